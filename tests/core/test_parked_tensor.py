"""While parked a weight tells the truth, takes writes, and refuses to compute."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import ALWAYS, Denoiser, assert_same_bits, non_layer_weights, snapshot
from park_core import Parking, WeightsParkedError
from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import FakeDevice


@pytest.fixture
def parked(fake_device: FakeDevice) -> tuple[Denoiser, dict[str, Tensor]]:
    """A component with parked weights and released layers, and its values."""
    torch.manual_seed(0)
    component = Denoiser().eval().requires_grad_(False)
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device, component_name="denoiser")
    values = snapshot(component)
    component.park_non_layer_weights()
    assert all(is_parked(weight) for weight in component.parameters())
    return component, values


class Scaled(nn.Module):
    """Layers that do not notice a wrong shape: each owns one weight that broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.mask_token = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.gain + self.mask_token


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "rms norm": lambda: nn.RMSNorm(4),
    "layer norm": lambda: nn.LayerNorm(4),
    "prelu": nn.PReLU,
    "broadcasting": Scaled,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "old weight norm": lambda: old_weight_norm(nn.Linear(4, 4)),
    "lstm": lambda: nn.LSTM(4, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 8).eval(),
}


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [False, True], ids=["called directly", "through the parent"])
def test_running_a_parked_module_raises_by_name(fake_device: FakeDevice, kind: str, inside: bool) -> None:
    module = KINDS[kind]().to(fake_device.device).requires_grad_(False)
    component = nn.Sequential(nn.Identity(), module)
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    rows = torch.ones(3, 4, device=fake_device.device)
    inputs = (rows, rows, rows) if kind == "attention" else (rows,)
    with pytest.raises(WeightsParkedError, match=r"component 'component'.*restore_non_layer_weights\(\)"):
        component(rows) if inside else module(*inputs)
    parking.restore()
    module(*inputs)
    assert not any(sub._forward_pre_hooks for sub in component.modules() if kind != "old weight norm")


@pytest.mark.parametrize("lone", ["weight", "bias"])
def test_one_parked_weight_is_enough(fake_device: FakeDevice, lone: str) -> None:
    module = nn.Linear(4, 4).to(fake_device.device).requires_grad_(False)
    held = getattr(module, "bias" if lone == "weight" else "weight").detach()  # a view elsewhere: it is not parked
    Parking(module, "component", ALWAYS).park()
    with pytest.raises(WeightsParkedError, match=f"'{lone}'"):
        module(torch.ones(1, 4, device=fake_device.device))
    del held


def test_the_guard_runs_before_other_hooks(parked: tuple[Denoiser, dict[str, Tensor]], tokens: Tensor) -> None:
    component, _ = parked
    seen: list[nn.Module] = []
    component.restore_non_layer_weights()
    component.norm.register_forward_pre_hook(lambda module, _: seen.append(module))
    component.park_non_layer_weights()
    with pytest.raises(WeightsParkedError, match=r"LayerNorm.forward needs 'norm.weight'"):
        component.norm(tokens)
    assert seen == []


COMPUTE: dict[str, Callable[[Tensor], object]] = {
    "function": lambda w: F.linear(torch.ones(1, w.shape[1], device=w.device), w),
    "operator": lambda w: w * 2,
    "reflected operator": lambda w: 2 + w,
    "method": lambda w: w.sum(),
    "overload": lambda w: torch.ops.aten.t(w),
    "list": lambda w: torch.cat([w, w]),
    "keyword": lambda w: torch.add(torch.ones(1), other=w),
    "out": lambda w: torch.add(1, torch.ones(1), out=w),
    "pointer": lambda w: w.data_ptr(),
    "numpy": lambda w: w.numpy(),
    "item": lambda w: w[0, 0],
    "in place": lambda w: w.add_(1),
    "scalar fill": lambda w: w.fill_(0),
    "one element": lambda w: w.mul_(torch.ones(1)),
    "index": lambda w: w.__setitem__(0, 0),
    "foreach": lambda w: torch._foreach_add_([w], 1),
    "set_": lambda w: w.set_(torch.ones(1, device=w.device)),
    "as_subclass": lambda w: w.as_subclass(Tensor),
}


@pytest.mark.parametrize("what", COMPUTE)
def test_computing_with_a_parked_weight_raises(parked: tuple[Denoiser, dict[str, Tensor]], what: str) -> None:
    component, values = parked
    with pytest.raises(WeightsParkedError, match=r"'embed\.weight'"):
        COMPUTE[what](component.embed.weight)
    component.restore_non_layer_weights()
    assert_same_bits(snapshot(component), values)


def test_metadata_is_that_of_the_weight(parked: tuple[Denoiser, dict[str, Tensor]], fake_device: FakeDevice) -> None:
    component, values = parked
    for name, weight in component.named_parameters():
        expected = values[name]
        assert (weight.shape, weight.stride(), weight.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert (weight.numel(), weight.nbytes, weight.ndim) == (expected.numel(), expected.nbytes, expected.ndim)
        assert weight.device == fake_device.device
        assert weight.is_contiguous()
        assert not weight.requires_grad
    assert "parked" in repr(component.embed.weight)
    assert hash(component.embed.weight) == id(component.embed.weight)


def test_state_dict_has_the_real_values(parked: tuple[Denoiser, dict[str, Tensor]]) -> None:
    component, values = parked
    state = component.state_dict()
    assert not any(is_parked(tensor) for tensor in state.values())
    assert_same_bits(dict(state), values)
    assert_same_bits(dict(component.norm.state_dict()), {"weight": values["norm.weight"], "bias": values["norm.bias"]})
    assert state["head.weight"].untyped_storage().data_ptr() == state["embed.weight"].untyped_storage().data_ptr()


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_takes_effect(
    parked: tuple[Denoiser, dict[str, Tensor]], fake_device: FakeDevice, assign: bool
) -> None:
    component, values = parked
    wanted = {name: tensor + 1 for name, tensor in values.items()}
    wanted["head.weight"] = wanted["embed.weight"]
    component.load_state_dict(wanted, assign=assign)
    component.restore_non_layer_weights()
    component.prepare_for_next_req()
    assert_same_bits(snapshot(component), wanted)
    assert {weight.device for weight in non_layer_weights(component).values()} == {fake_device.device}


def test_a_checkpoint_of_another_shape_is_refused(parked: tuple[Denoiser, dict[str, Tensor]]) -> None:
    component, values = parked
    with pytest.raises(RuntimeError, match="size mismatch"):
        component.load_state_dict({**values, "scale": torch.empty(0)})
    component.restore_non_layer_weights()
    assert component.scale.item() == 0.5


WRITES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "copy_": lambda w, x: w.copy_(x),
    "data.copy_": lambda w, x: w.data.copy_(x),
    "data.add_": lambda w, x: w.data.zero_().add_(x.cpu()),
    "data =": lambda w, x: setattr(w, "data", x),
    "data = on the host": lambda w, x: setattr(w, "data", x.cpu()),
    "detach": lambda w, x: w.detach().copy_(x),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("where", ["norm.weight", "embed.weight", "scale", "blocks.1.weight"])
def test_a_write_reaches_the_weight(
    parked: tuple[Denoiser, dict[str, Tensor]], fake_device: FakeDevice, tokens: Tensor, write: str, where: str
) -> None:
    component, values = parked
    weight = component.get_parameter(where)
    value = torch.full_like(values[where], 0.25, device=fake_device.device)
    WRITES[write](weight, value)
    for _ in range(2):
        component.restore_non_layer_weights()
        component.prepare_for_next_req()
        component(tokens)
        component.park_non_layer_weights()
    component.restore_non_layer_weights()
    changed = {name for name, tensor in snapshot(component).items() if not torch.equal(tensor, values[name])}
    assert changed == {where} | ({"head.weight"} if where == "embed.weight" else set())
    assert (component.get_parameter(where).detach().cpu() == 0.25).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_conversion_of_dtype_is_honoured(
    parked: tuple[Denoiser, dict[str, Tensor]], fake_device: FakeDevice, dtype: torch.dtype
) -> None:
    component, values = parked
    component.to(dtype)
    assert fake_device.requested == 64 * dtype.itemsize  # the buffer
    component.restore_non_layer_weights()
    assert_same_bits(snapshot(component), {name: tensor.to(dtype) for name, tensor in values.items()})
    assert {tensor.device for tensor in non_layer_weights(component).values()} == {fake_device.device}
    assert component.head.weight is component.embed.weight


def test_a_move_to_the_host_is_honoured(parked: tuple[Denoiser, dict[str, Tensor]], fake_device: FakeDevice) -> None:
    component, values = parked
    component.to("cpu")
    assert {tensor.device.type for tensor in component.state_dict(keep_vars=True).values()} == {"cpu"}
    assert not any(is_parked(weight) for weight in component.parameters())
    component.restore_non_layer_weights()  # it stays where it was moved
    assert {tensor.device.type for tensor in component.state_dict(keep_vars=True).values()} == {"cpu"}
    assert_same_bits(snapshot(component), values)
    assert fake_device.requested == 0


def test_a_move_to_where_it_is_changes_nothing(
    parked: tuple[Denoiser, dict[str, Tensor]], fake_device: FakeDevice
) -> None:
    component, _ = parked
    fake_device.clear_transfers()
    component.to(fake_device.device)
    assert all(is_parked(weight) for weight in component.parameters())
    assert fake_device.transfers == []


@pytest.mark.fake_device(count=2)
def test_a_move_to_another_device_is_honoured(parked: tuple[Denoiser, dict[str, Tensor]]) -> None:
    component, values = parked
    component.to("fakegpu:1")
    component.restore_non_layer_weights()
    assert {str(weight.device) for weight in non_layer_weights(component).values()} == {"fakegpu:1"}
    assert_same_bits(snapshot(component), values)


@pytest.mark.parametrize("clone", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_independent(parked: tuple[Denoiser, dict[str, Tensor]], tokens: Tensor, clone: str) -> None:
    component, values = parked
    twin = CLONES[clone](component)
    assert not any(is_parked(weight) for weight in twin.parameters())
    assert_same_bits(snapshot(twin), values)
    twin(tokens)
    assert not twin.norm._forward_pre_hooks  # the guard sees that it has nothing to guard there
    with torch.no_grad():
        twin.norm.weight.zero_()
    component.restore_non_layer_weights()
    assert_same_bits(snapshot(component), values)


def by_torch_save(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CLONES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": by_torch_save,
}
