"""Weights that wrap other tensors are parked by what they wrap: torchao's int8 and float8, DTensor, and deeper ones."""

from __future__ import annotations

import copy
import io
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from conftest import ALWAYS, MEMORY, bits
from park_core import (
    LayerwiseOffloadableModuleMixin,
    OffloadConfig,
    ParkError,
    Parking,
    WeightsParkedError,
)
from park_core.component import offload_of
from park_core.parked_tensor import is_parked
from park_core.updates import iter_materialized_weights, update_cpu_weights
from park_core.wrappers import inner_tensors
from pytest_park.fakegpu import FakeDevice


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """Of one process, which DTensor and FSDP need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Product(Tensor):
    """Wraps ``content`` and ``scale``, and multiplies them whenever it is used. It does not tell what it wraps."""

    content: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, content: Tensor, scale: Tensor) -> Product:
        made = Tensor._make_wrapper_subclass(cls, content.shape, dtype=torch.float32, device=content.device)
        made.content, made.scale = content, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") == torch.float32:  # its own: a mere move
            del kwargs["dtype"]
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(func(args[0].content, *args[1:], **kwargs), func(args[0].scale, *args[1:], **kwargs))
        if func is torch.ops.aten.copy_.default:
            args[0].content.copy_(args[1].content)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return func(*(a.content * a.scale if isinstance(a, cls) else a for a in args), **kwargs)


class Fleeting(Product):
    """Tells what it wraps, but hands out another tensor each time."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["view"], None

    @property
    def view(self) -> Tensor:
        return self.content[:]


class Scaled(Product):
    """Tells what it wraps. Either may be such a tensor, too."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["content", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Product:
        return cls(inner["content"], inner["scale"])


def quantized(config: object) -> Callable[[], nn.Linear]:
    def make() -> nn.Linear:
        layer = nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False)
        quantize_(layer, config)
        return layer

    return make


def distributed() -> nn.Linear:
    layer = nn.Linear(64, 32, bias=False)
    mesh = init_device_mesh("cpu", (1,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]), requires_grad=False)
    return layer


def wrapping(make: Callable[[Tensor], Tensor]) -> Callable[[], nn.Linear]:
    def layer() -> nn.Linear:
        layer = nn.Linear(64, 32).requires_grad_(False)
        layer.weight = nn.Parameter(make(torch.randn(32, 64)), requires_grad=False)
        return layer

    return layer


def of_one_buffer(values: Tensor) -> Tensor:
    buffer = torch.cat([values.flatten(), torch.full((32,), 0.5)])
    return Scaled(buffer[: 32 * 64].view(32, 64), buffer[32 * 64 :, None])


KINDS: dict[str, Callable[[], nn.Linear]] = {
    "int8": quantized(Int8WeightOnlyConfig(version=2)),
    "float8": quantized(Float8WeightOnlyConfig()),
    "DTensor": distributed,
    "one level": wrapping(lambda w: Scaled(w, torch.tensor(2.0))),
    "two levels": wrapping(lambda w: Scaled(Scaled(w.to(torch.int8), torch.full((32, 1), 0.5)), torch.tensor(3.0))),
    "views of one buffer": wrapping(of_one_buffer),
}


@pytest.fixture(params=KINDS)
def component(request: pytest.FixtureRequest, fake_device: FakeDevice) -> nn.Sequential:
    """A layer whose weight wraps others and a layer of the usual kind, on the device."""
    torch.manual_seed(0)
    layer = KINDS[request.param]()
    return nn.Sequential(layer, nn.Linear(8, 8)).requires_grad_(False).to(fake_device.device)


def rows(component: nn.Sequential) -> Tensor:
    weight = component[0].weight
    values = torch.linspace(-1, 1, 128).view(2, 64).to(weight.device, weight.dtype)
    if isinstance(weight, DTensor):
        return DTensor.from_local(values.cpu(), weight.device_mesh, [Replicate()]).to(weight.device)
    return values


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu()


def parts(component: nn.Module) -> dict[str, Tensor]:
    """Every tensor that holds bytes."""
    owned = itertools.chain(component.named_parameters(remove_duplicate=False), component.named_buffers())
    return {name: part for outer, tensor in owned for name, part in inner_tensors(outer, tensor)}


def content(component: nn.Module) -> dict[str, Tensor]:
    """Their bytes, on the host, sharing nothing."""
    return {name: bits(part).clone() for name, part in parts(component).items()}


def assert_same(component: nn.Module, expected: dict[str, Tensor]) -> None:
    found = content(component)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def total(component: nn.Module) -> int:
    return sum({s.data_ptr(): s.nbytes() for t in parts(component).values() if (s := t.untyped_storage())}.values())


def held_below_torch_functions(component: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return sum(part.untyped_storage().nbytes() for part in parts(component).values())


def test_the_bytes_fall_and_come_back(component: nn.Sequential, fake_device: FakeDevice) -> None:
    weight, expected, before = component[0].weight, content(component), parts(component)
    weight.note = "kept"
    layout = {name: (t.shape, t.stride(), t.storage_offset(), t.dtype) for name, t in before.items()}
    identity, resident, size = type(weight), fake_device.requested, total(component)
    assert resident == size
    output = local(component[0](rows(component)))
    parking = Parking(component, "component", ALWAYS)
    for _ in range(2):
        report = parking.park()
        assert (report.bytes_freed, report.skipped) == (size, [])
        assert fake_device.requested == 0
        assert type(weight) is identity
        assert held_below_torch_functions(component) == 0
        restored = parking.restore()
        assert restored.bytes_restored == size
        assert fake_device.requested == resident
        assert component[0].weight is weight
        assert (type(weight), weight.note, weight.requires_grad) == (identity, "kept", False)
        after = parts(component)
        assert all(after[name] is before[name] for name in before)
        assert {n: (t.shape, t.stride(), t.storage_offset(), t.dtype) for n, t in after.items()} == layout
        assert {type(tensor) for tensor in after.values()} == {Tensor, nn.Parameter}
        assert_same(component, expected)
        assert torch.equal(local(component[0](rows(component))), output)


def test_a_second_park_moves_nothing_unless_something_was_written(
    component: nn.Sequential, fake_device: FakeDevice
) -> None:
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    parking.restore()
    assert parking.park().bytes_to_host == 0
    parking.restore()
    name, part = next(iter(parts(component).items()))
    part.data.view(torch.uint8).add_(1)
    expected, size = content(component), part.untyped_storage().nbytes()
    assert parking.park().bytes_to_host == size
    parking.restore()
    assert_same(component, expected)
    assert name.startswith("0.weight")


USES: dict[str, Callable[[nn.Sequential], object]] = {
    "through the parent": lambda c: c(torch.ones(2, 64, device="cpu")),
    "called directly": lambda c: c[0](torch.ones(2, 64)),
    "function": lambda c: F.linear(rows(c), c[0].weight),
    "inner tensor": lambda c: next(iter(parts(c).values())) * 2,
    "inner tensor, in place": lambda c: next(iter(parts(c).values())).fill_(0),
    "inner tensor, below torch functions": lambda c: without_torch_functions(
        lambda: torch.add(next(iter(parts(c).values())), 1)
    ),
}


def without_torch_functions(function: Callable[[], object]) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return function()


def test_the_guard_comes_before_the_work_of_the_wrapper(component: nn.Sequential) -> None:
    Parking(component, "component", ALWAYS).park()
    for run in (component, component[0]):
        with pytest.raises(WeightsParkedError, match=r"^Linear\.forward needs '0\.weight\."):
            run(rows(component))


@pytest.mark.parametrize("use", USES)
def test_use_while_parked_raises_by_name(component: nn.Sequential, use: str) -> None:
    expected = content(component)
    parking = Parking(component, "encoder", ALWAYS)
    parking.park()
    with pytest.raises(WeightsParkedError, match=r"'0\.weight\..*component 'encoder'.*restore_non_layer_weights\(\)"):
        USES[use](component)
    parking.restore()
    assert_same(component, expected)
    component[0](rows(component))
    assert not any(module._forward_pre_hooks for module in component.modules())


def test_while_parked_the_values_can_be_read_and_copied(component: nn.Sequential, fake_device: FakeDevice) -> None:
    expected = content(component)
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    state = component.state_dict()
    assert fake_device.requested == 0
    assert_same(component, expected)
    on_host = state["0.weight"].to("cpu")
    assert type(on_host) is type(component[0].weight)
    assert all(torch.equal(bits(t), expected[name]) for name, t in inner_tensors("0.weight", on_host))
    twin = copy.deepcopy(component[0].weight)
    assert not any(is_parked(tensor) for _, tensor in inner_tensors("", twin))
    assert all(torch.equal(bits(t), expected[name]) for name, t in inner_tensors("0.weight", twin))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["0.weight"]
    assert all(torch.equal(bits(t), expected[name]) for name, t in inner_tensors("0.weight", loaded))
    for _, tensor in inner_tensors("", twin):
        tensor.zero_()
    assert_same(component, expected)
    assert "parked" in f"{next(iter(parts(component).values()))}"
    parking.restore()
    assert_same(component, expected)


WRITES: dict[str, Callable[[nn.Sequential, nn.Sequential], object]] = {
    "copy_": lambda c, new: c[0].weight.copy_(new[0].weight),
    "detach": lambda c, new: c[0].weight.detach().copy_(new[0].weight),
    "load_state_dict": lambda c, new: c.load_state_dict(new.state_dict()),
    "load_state_dict(assign)": lambda c, new: c.load_state_dict(new.state_dict(), assign=True),
    "a new parameter": lambda c, new: setattr(c[0], "weight", new[0].weight),
    "inner": lambda c, new: [o.copy_(n) for o, n in zip(parts(c).values(), parts(new).values(), strict=True)],
    "inner .data": lambda c, new: [
        setattr(o, "data", n.clone()) for o, n in zip(parts(c).values(), parts(new).values(), strict=True)
    ],
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_while_parked_reaches_the_weight(component: nn.Sequential, fake_device: FakeDevice, write: str) -> None:
    new = copy.deepcopy(component)
    for part in {id(p): p for p in parts(new).values() if p.dtype is not torch.float8_e4m3fn}.values():
        part.copy_(part.to(torch.float32) * 0.5)
    wanted = content(new)
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    with torch.no_grad():
        WRITES[write](component, new)
    written = {
        name: wanted[name] if name.startswith("0.weight") or "load" in write or "inner" in write else bits_now
        for name, bits_now in content(component).items()
    }
    for _ in range(2):
        parking.restore()
        assert_same(component, written)
        parking.park()
    parking.restore()
    assert_same(component, written)


def test_ties_by_inner_tensors_are_kept(component: nn.Sequential, fake_device: FakeDevice) -> None:
    weight = component[0].weight
    names, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    alias = type(weight).__tensor_unflatten__(inner, context, weight.shape, weight.stride())
    component.append(nn.Linear(64, 32, bias=False, device="meta"))
    component[2].weight = nn.Parameter(alias, requires_grad=False)
    component.append(nn.Identity())
    component[3].register_parameter("same", weight)
    size = total(component)
    assert size == fake_device.requested
    parking = Parking(component, "component", ALWAYS)
    assert parking.park().bytes_freed == size
    parking.restore()
    assert fake_device.requested == size
    assert component[3].same is weight
    first, second = (next(inner_tensors("", component[i].weight))[1] for i in (0, 2))
    first.view(torch.uint8).zero_()
    assert bits(second).count_nonzero() == 0


def test_a_move_to_where_it_is_changes_nothing(component: nn.Sequential, fake_device: FakeDevice) -> None:
    weight, expected = component[0].weight, content(component)
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    fake_device.clear_transfers()
    component.to(fake_device.device)
    assert component[0].weight is weight
    assert all(is_parked(part) for part in parts(component).values())
    assert fake_device.transfers == []
    parking.restore()
    assert_same(component, expected)


def test_a_move_to_the_host_is_honoured(component: nn.Sequential, fake_device: FakeDevice) -> None:
    weight, expected = component[0].weight, content(component)
    parking = Parking(component, "component", ALWAYS, fake_device.device)
    parking.park()
    component.to("cpu")
    assert component[0].weight is weight
    parking.restore()
    assert {part.device.type for part in parts(component).values()} == {"cpu"}
    assert weight.device.type == "cpu"
    assert fake_device.requested == 0
    assert_same(component, expected)
    Parking(component, "component", ALWAYS, fake_device.device).restore()  # now it belongs on the device again
    assert {part.device for part in parts(component).values()} == {fake_device.device}
    assert weight.device == fake_device.device
    assert_same(component, expected)


def test_a_conversion_of_dtype_is_honoured(fake_device: FakeDevice) -> None:
    component = KINDS["one level"]().to(fake_device.device)
    values = component.weight.content.cpu()
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    component.to(torch.bfloat16)
    assert fake_device.requested == 0
    parking.restore()
    assert component.weight.content.dtype == component.bias.dtype == torch.bfloat16
    assert component.weight.content.device == fake_device.device
    assert torch.equal(component.weight.content.cpu(), values.to(torch.bfloat16))


@pytest.mark.parametrize("fault", ["fail_host_copy", "fail_device_copy", "fail_allocation"])
@pytest.mark.parametrize("verb", ["park", "restore"])
def test_a_failure_at_every_point_changes_nothing(
    component: nn.Sequential, fake_device: FakeDevice, fault: str, verb: str
) -> None:
    expected, failed = content(component), 0
    parking = Parking(component, "component", OffloadConfig(parking="always", keep_host_copies=False))
    for k in itertools.count(1):
        parking.park() if verb == "restore" else parking.restore()
        before = fake_device.requested
        getattr(fake_device, fault)(after=k)
        try:
            getattr(parking, verb)()
        except (MemoryError, torch.OutOfMemoryError):
            failed += 1
            fake_device.clear_faults()
            assert fake_device.requested == before
            assert {is_parked(part) for part in parts(component).values()} == {verb == "restore"}
            assert_same(component, expected)
            getattr(parking, verb)()
        else:
            break
        finally:
            fake_device.clear_faults()
    assert (failed > 0) == ((fault == "fail_host_copy") == (verb == "park"))
    parking.restore()
    assert_same(component, expected)


class Stack(nn.Module, LayerwiseOffloadableModuleMixin):
    """Layers with such weights, streamed, and one that is not."""

    layer_names = ("layers",)

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(KINDS[kind](), nn.Linear(32, 64)) for _ in range(3))
        self.head = KINDS[kind]()
        self.requires_grad_(False).to(self.head.weight.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "DTensor"])
@pytest.mark.parametrize("source", ["the host", "the device"])
def test_layers_are_streamed_and_the_rest_is_placed_and_parked(fake_device: FakeDevice, kind: str, source: str) -> None:
    torch.manual_seed(0)
    stack = Stack(kind)
    values, weights = content(stack), dict(stack.named_parameters())
    stack.to(fake_device.device)
    hidden = torch.ones(2, 64, dtype=stack.head.weight.dtype, device=fake_device.device)
    expected = stack(hidden).cpu()
    stack.to("cpu" if source == "the host" else fake_device.device)
    idle = fake_device.requested
    stack.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    assert dict(stack.named_parameters()).items() == weights.items()
    assert {weight.device for weight in weights.values()} == {fake_device.device}
    assert fake_device.requested == hidden.nbytes + total(stack.head)
    assert idle >= hidden.nbytes
    for _ in range(2):
        assert torch.equal(stack(hidden).cpu(), expected)
        offload_of(stack).release_layers()
        stack.park_non_layer_weights()
        assert fake_device.requested == hidden.nbytes
        assert_same(stack, values)
        stack.restore_non_layer_weights()
    assert local(F.linear(hidden, stack.layers[1][0].weight)).shape == (2, 32)  # apart from its layer: it is loaded
    stack.disable_layerwise_offload() if hasattr(stack, "disable_layerwise_offload") else offload_of(stack).remove()
    assert_same(stack, values)
    assert torch.equal(stack(hidden).cpu(), expected)
    assert {type(part) for part in parts(stack).values()} == {Tensor, nn.Parameter}


STREAMED_WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "inside": lambda weight, other: weight.scale.mul_(2),
    "data inside": lambda weight, other: weight.scale.data.mul_(2),
    "copy_": lambda weight, other: weight.copy_(other),
    "data.copy_": lambda weight, other: weight.data.copy_(other),
}


@pytest.mark.parametrize("write", STREAMED_WRITES)
def test_a_write_to_a_streamed_layer_reaches_the_host_store(fake_device: FakeDevice, write: str) -> None:
    stack = Stack("int8")
    other = copy.deepcopy(stack.layers[0][0].weight).to(fake_device.device)
    stack.configure_layerwise_offload(MEMORY, device=fake_device.device)
    manager = offload_of(stack).managers[0]
    for _ in range(2):
        manager.prefetch_layer(1, non_blocking=False)
        fake_device.clear_transfers()
        manager.release_all()
        assert not any(t.kind == "d2h" and t.bytes > 64 for t in fake_device.transfers)  # nothing was written yet
    manager.prefetch_layer(1, non_blocking=False)
    before = content(stack)
    STREAMED_WRITES[write](stack.layers[1][0].weight, other)
    expected = content(stack)
    assert any(not torch.equal(expected[name], before[name]) for name in before)
    manager.release_all()
    assert_same(stack, expected)
    manager.prefetch_layer(1, non_blocking=False)
    assert_same(stack, expected)


def test_a_configuration_that_fails_leaves_it_on_the_host(fake_device: FakeDevice) -> None:
    stack = Stack("two levels")
    values, weight = content(stack), stack.head.weight
    fake_device.fail_allocation(after=2)
    with pytest.raises(torch.OutOfMemoryError):
        stack.configure_layerwise_offload(MEMORY, device=fake_device.device)
    assert stack.head.weight is weight
    assert {weight.device.type for weight in stack.parameters()} == {"cpu"}
    assert {part.device.type for part in parts(stack).values()} == {"cpu"}
    assert fake_device.requested == 0
    assert_same(stack, values)


def test_weights_can_be_listed_with_their_values(component: nn.Sequential) -> None:
    expected = content(component)
    Parking(component, "component", ALWAYS).park()
    listed = dict(iter_materialized_weights(component))
    assert all(torch.equal(bits(t), expected[n]) for name in listed for n, t in inner_tensors(name, listed[name]))


def test_an_update_is_of_the_same_class_or_refused_before_anything_is_written(component: nn.Sequential) -> None:
    new = copy.deepcopy(component[0].weight)
    for _, part in inner_tensors("", new):
        part.zero_()
    expected = content(component)
    Parking(component, "component", ALWAYS).park()
    plain = torch.zeros(component[0].weight.shape)
    with pytest.raises(ParkError, match=r"'0.weight' is a .*nothing was updated"):
        update_cpu_weights(component, {"1.weight": torch.zeros(8, 8), "0.weight": plain})
    assert_same(component, expected)
    update_cpu_weights(component, {"1.weight": torch.zeros(8, 8), "0.weight": new})
    zeroed = [values for name, values in content(component).items() if name.startswith(("0.weight", "1.weight"))]
    assert not any(values.count_nonzero() for values in zeroed)


@pytest.mark.parametrize("made", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize("parked", [False, True], ids=["parked outside", "parked inside"])
@pytest.mark.parametrize("restored", [False, True], ids=["restored outside", "restored inside"])
def test_inference_tensors_inside_stay_what_they_are(
    fake_device: FakeDevice, made: bool, parked: bool, restored: bool
) -> None:
    component = nn.Module()
    with torch.inference_mode(made):
        inner = [torch.arange(8.0, device=fake_device.device), torch.tensor(2.0, device=fake_device.device)]
        component.weight = nn.Parameter(Scaled(*inner), requires_grad=False)
    del inner
    parking = Parking(component, "component", ALWAYS)
    for _ in range(2):
        with torch.inference_mode(parked):
            assert parking.park().bytes_freed == 36
        assert {part.is_inference() for part in parts(component).values()} == {made}
        with torch.inference_mode(restored):
            parking.restore()
        assert {part.is_inference() for part in parts(component).values()} == {made}
        assert torch.equal((component.weight + 1).cpu(), torch.arange(8) * 2.0 + 1)
        if not made:  # which has a version, that counts
            version = component.weight.content._version
            assert component.weight.content.add_(0)._version == version + 1


def test_one_inner_tensor_that_is_viewed_elsewhere_is_named(fake_device: FakeDevice) -> None:
    component = KINDS["int8"]().to(fake_device.device)
    expected = content(component)
    held = component.weight.scale.view(-1)
    parking = Parking(component, "component", ALWAYS)
    report = parking.park()
    assert [(s.name, s.bytes) for s in report.skipped] == [("weight.scale", held.nbytes)]
    assert fake_device.requested == held.nbytes
    with pytest.raises(WeightsParkedError):
        component(torch.ones(1, 64, dtype=torch.bfloat16, device=fake_device.device))
    parking.restore()
    assert_same(component, expected)


@pytest.mark.parametrize("cls", [Product, Fleeting])
def test_what_does_not_tell_what_it_wraps_is_named_with_its_true_bytes_and_untouched(
    fake_device: FakeDevice, cls: type[Product]
) -> None:
    component = nn.Linear(4, 4).requires_grad_(False).to(fake_device.device)
    inner = torch.arange(8, dtype=torch.int8, device=fake_device.device)
    odd = component.odd = nn.Parameter(cls(inner, torch.tensor(2.0, device=fake_device.device)), requires_grad=False)
    pointer = odd.content.data_ptr()
    parking = Parking(component, "component", ALWAYS)
    report = parking.park()
    assert report.skipped == [("odd", f"its class {cls.__name__} wraps other tensors and does not tell which", 8 + 4)]
    assert report.bytes_freed == 20 * 4
    assert fake_device.requested == 8 + 4
    assert odd.content.data_ptr() == pointer
    assert torch.equal((odd + 0).cpu(), torch.arange(8) * 2.0)


def test_an_inner_tensor_that_autograd_holds_is_named(fake_device: FakeDevice) -> None:
    scale = torch.ones((), device=fake_device.device, requires_grad=True)
    component = nn.Module()
    inner = Scaled(torch.ones(8, device=fake_device.device), scale.detach())
    component.register_parameter("weight", nn.Parameter(inner, requires_grad=False))
    component.weight.scale = scale * 2
    del inner
    report = Parking(component, "component", ALWAYS).park()
    assert report.skipped == [("weight.scale", "it is inside a wrapper, and autograd holds it", 4)]
    assert report.bytes_freed == 8 * 4


@pytest.mark.parametrize("kind", ["DTensor", "one level"])
@pytest.mark.parametrize("source", ["the host", "the device"])
def test_a_trainable_weight_stays_one(fake_device: FakeDevice, kind: str, source: str) -> None:
    component = KINDS[kind]().requires_grad_(True).to("cpu" if source == "the host" else fake_device.device)
    weight, values = component.weight, content(component)
    parking = Parking(component, "component", ALWAYS, fake_device.device)
    for _ in range(2):
        parking.restore()
        assert weight.device == fake_device.device
        assert (weight.requires_grad, weight.is_leaf, weight.grad) == (True, True, None)
        assert fake_device.requested == total(component)
        assert parking.park().decision.verdict == "park"
        assert fake_device.requested == 0
    parking.restore()
    assert component.weight is weight
    assert_same(component, values)
    assert component(rows(nn.Sequential(component))).requires_grad


@pytest.mark.parametrize("k", [1, 2])
def test_a_failure_on_the_way_from_the_host_leaves_it_there(fake_device: FakeDevice, k: int) -> None:
    component = KINDS["two levels"]()
    weight, values = component.weight, content(component)
    parking = Parking(component, "component", ALWAYS, fake_device.device)
    fake_device.fail_allocation(after=k)
    with pytest.raises(torch.OutOfMemoryError):
        parking.restore()
    assert {tensor.device.type for tensor in (weight, *parts(component).values())} == {"cpu"}
    assert fake_device.requested == 0
    assert_same(component, values)
    parking.restore()
    assert weight.device == fake_device.device
    assert_same(component, values)


def test_a_wrapper_that_is_deleted_while_parked_takes_its_host_copies_along(component: nn.Sequential) -> None:
    Parking(component, "component", ALWAYS).park()
    host = [weakref.ref(part._parked.group.host.storage) for _, part in inner_tensors("", component[0].weight)]
    component[0].weight = None
    assert [ref() for ref in host] == [None] * len(host)


def test_a_module_that_fsdp_manages_is_refused_by_name(fake_device: FakeDevice) -> None:
    component = nn.Sequential(nn.Linear(4, 4))
    fully_shard(component, mesh=init_device_mesh("cpu", (1,)))
    decision = Parking(component, "component", ALWAYS).park().decision
    assert decision.verdict == "refuse"
    assert "FSDP" in decision.reason
