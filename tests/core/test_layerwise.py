"""Layers are on the device only while they run, whatever the order, and come with the right values."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conftest import ALWAYS, MEMORY, Denoiser, assert_same_bits, snapshot
from park_core import (
    HostHeadroom,
    LayerwiseOffloadManager,
    OffloadConfig,
    ParkError,
    WeightsParkedError,
    layerwise_offloadable,
)
from park_core.component import offload_of
from park_core.parked_tensor import is_parked, parked_group
from park_core.storage import group_of
from pytest_park.fakegpu import FakeDevice
from pytest_park.fakegpu.pinned import pinned_bytes


def on_device(manager: LayerwiseOffloadManager, component: Denoiser) -> list[int]:
    return [i for i in range(len(manager)) if not any(is_parked(w) for w in component.blocks[i].parameters())]


def streamed(device: FakeDevice, **settings: object) -> tuple[Denoiser, LayerwiseOffloadManager]:
    torch.manual_seed(0)
    component = Denoiser(blocks=6).eval().requires_grad_(False)
    component.configure_layerwise_offload(OffloadConfig(**settings), device=device.device)  # type: ignore[arg-type]
    return component, component.layerwise_offload_managers[0]


def test_configuring_moves_everything_but_the_layers(fake_device: FakeDevice) -> None:
    component, manager = streamed(fake_device)
    assert on_device(manager, component) == []
    rest = {name: tensor for name, tensor in component.state_dict().items() if not name.startswith("blocks")}
    assert {tensor.device for tensor in rest.values()} == {fake_device.device}
    del rest["head.weight"]
    assert fake_device.requested == sum(tensor.nbytes for tensor in rest.values())


@pytest.mark.parametrize("source", ["the host", "the device"])
def test_streaming_gives_the_result_of_the_resident_component(
    fake_device: FakeDevice, tokens: Tensor, source: str
) -> None:
    torch.manual_seed(0)
    component = Denoiser().eval().requires_grad_(False)
    values = snapshot(component)
    expected = component.to(fake_device.device)(tokens)
    if source == "the host":
        component.to("cpu")
    component.configure_layerwise_offload(MEMORY, device=fake_device.device)
    for _ in range(2):
        assert torch.equal(component(tokens), expected)
    assert_same_bits(snapshot(component), values)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 1.0])
def test_the_prefetch_depth_bounds_the_layers_on_the_device(
    fake_device: FakeDevice, tokens: Tensor, prefetch: float
) -> None:
    component, _ = streamed(fake_device, prefetch=prefetch)
    layer = sum(weight.nbytes for weight in component.blocks[0].parameters())
    idle, seen = fake_device.requested, []

    def look(*_: object) -> None:
        seen.append(round((fake_device.requested - idle) / layer))

    for block in component.blocks:
        block.register_forward_pre_hook(look)
    component(tokens)
    depth = 5 if isinstance(prefetch, float) else prefetch
    assert set(seen) == {1 + depth}


@pytest.mark.parametrize(
    ("settings", "resident"),
    [
        ({"resident_layers": 0}, []),
        ({"resident_layers": 2}, [0, 1]),
        ({"resident_layers": 0.5}, [0, 1, 2]),
        ({"resident_layers": 2, "residency_policy": "strided"}, [0, 3]),
        ({"resident_layers": 1.0, "residency_policy": "strided"}, [0, 1, 2, 3, 4, 5]),
        ({"resident_layers": 99}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_resident_layers_stay_until_all_are_released(
    fake_device: FakeDevice, tokens: Tensor, settings: dict[str, object], resident: list[int]
) -> None:
    component, manager = streamed(fake_device, prefetch=0, **settings)
    idle = fake_device.requested
    component.prepare_for_next_req()
    component(tokens)
    assert on_device(manager, component) == resident
    fake_device.clear_transfers()
    component(tokens)
    assert len(fake_device.transfers) == 2 * (6 - len(resident))
    manager.release_all()
    assert fake_device.requested == idle


ORDERS: dict[str, list[int]] = {
    "reversed": [5, 4, 3, 2, 1, 0],
    "skipping": [0, 2, 5],
    "repeated": [0, 0, 1, 1, 0, 3],
    "one": [3],
}


@pytest.mark.parametrize("order", ORDERS)
def test_layers_out_of_order_are_loaded_on_demand(fake_device: FakeDevice, tokens: Tensor, order: str) -> None:
    component, manager = streamed(fake_device)
    hidden = component.embed(tokens)
    expected, actual = hidden.cpu(), hidden
    weights = [[w.detach().clone() for w in block.parameters()] for block in component.blocks]
    idle = fake_device.requested
    for index in ORDERS[order]:
        weight, bias = weights[index]
        expected = nn.functional.linear(expected, weight, bias)
        actual = component.blocks[index](actual)
        assert on_device(manager, component) == []
        assert fake_device.requested <= idle + 3 * hidden.nbytes + (64 * 64 + 64) * 4  # one layer is ahead
    torch.testing.assert_close(actual.cpu(), expected)


USES: dict[str, Callable[[nn.Linear], Tensor]] = {
    "a submodule that the layer does not run": lambda layer: nn.Linear.forward(layer, layer.bias),
    "one weight": lambda layer: layer.weight + 0,
    "two weights of one layer": lambda layer: nn.functional.linear(layer.bias, layer.weight),
    "weights in a list": lambda layer: torch.cat([layer.weight, layer.weight]),
}


@pytest.mark.parametrize("use", USES)
def test_a_streamed_weight_that_is_used_apart_from_its_layer_comes_on_demand(
    fake_device: FakeDevice, tokens: Tensor, use: str
) -> None:
    component, manager = streamed(fake_device, prefetch=0)
    manager.load_all_layers()
    expected = USES[use](component.blocks[3])
    manager.release_all()
    assert torch.equal(USES[use](component.blocks[3]), expected)
    assert on_device(manager, component) == [3]
    component(tokens)
    assert on_device(manager, component) == []
    USES[use](component.blocks[3])
    manager.release_all()
    assert on_device(manager, component) == []


def test_a_streamed_weight_that_cannot_come_is_refused_by_name(fake_device: FakeDevice) -> None:
    component, manager = streamed(fake_device, prefetch=0)
    fake_device.fail_allocation()
    with pytest.raises(torch.OutOfMemoryError):
        component.blocks[3].weight.sum()
    weight = component.blocks[3].weight
    manager.remove()
    with pytest.raises(WeightsParkedError, match=r"blocks\.3\.weight"):
        weight.sum()


def test_a_missing_look_ahead_is_not_an_error(fake_device: FakeDevice, tokens: Tensor) -> None:
    component, _ = streamed(fake_device)
    expected = component(tokens)
    component.layerwise_offload_managers[0].release_all()
    allocations = fake_device.allocations
    fake_device.fail_allocation()
    component.prepare_for_next_req()
    assert fake_device.allocations == allocations
    assert torch.equal(component(tokens), expected)


WRITES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "add_": lambda w, x: w.copy_(x),
    "data =": lambda w, x: setattr(w, "data", x),
    "data.copy_": lambda w, x: w.data.copy_(x),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("loaded", [False, True])
def test_a_write_to_a_streamed_weight_survives(
    fake_device: FakeDevice, tokens: Tensor, write: str, loaded: bool
) -> None:
    component, manager = streamed(fake_device)
    before = snapshot(component)
    if loaded:
        manager.load_all_layers()
    WRITES[write](component.blocks[2].weight, torch.full((64, 64), 0.125, device=fake_device.device))
    manager.release_all()
    component(tokens)
    after = snapshot(component)
    assert (after["blocks.2.weight"] == 0.125).all()
    del before["blocks.2.weight"], after["blocks.2.weight"]
    assert_same_bits(after, before)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("settings", [{}, {"prefetch": 0}, {"resident_layers": 6}])
def test_a_layer_may_write_to_its_weights_in_its_forward(
    fake_device: FakeDevice, tokens: Tensor, write: str, settings: dict[str, object]
) -> None:
    component, manager = streamed(fake_device, **settings)
    before = snapshot(component)

    def written(block: nn.Module, _: object) -> None:
        WRITES[write](block.weight, torch.full((64, 64), 0.125, device=fake_device.device))

    hook = component.blocks[2].register_forward_pre_hook(written)
    component(tokens)
    hook.remove()
    manager.release_all()
    fake_device.clear_transfers()
    component(tokens)
    assert {t.kind for t in fake_device.transfers} <= {"h2d"}  # what was written went to the host once
    after = snapshot(component)
    assert (after["blocks.2.weight"] == 0.125).all()
    del before["blocks.2.weight"], after["blocks.2.weight"]
    assert_same_bits(after, before)


def test_weights_that_are_declared_immutable_are_not_watched(fake_device: FakeDevice, tokens: Tensor) -> None:
    component, manager = streamed(fake_device, immutable_weights=True)
    manager.load_all_layers()
    assert {type(weight) for weight in component.parameters()} == {nn.Parameter}
    component.blocks[2].weight.data.sum()
    fake_device.clear_transfers()
    manager.release_all()
    assert fake_device.transfers == []


@pytest.mark.parametrize("inside", [False, True])
def test_layers_made_in_inference_mode_are_streamed_and_written_to(fake_device: FakeDevice, inside: bool) -> None:
    with torch.inference_mode():
        component, rows = Denoiser(), torch.arange(12, device=fake_device.device)
        expected = component(rows.cpu())
    component.configure_layerwise_offload(MEMORY, device=fake_device.device)
    manager = component.layerwise_offload_managers[0]
    with torch.inference_mode(inside), torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(component(rows).cpu(), expected)
        manager.release_all()
        fake_device.clear_transfers()
        component(rows)
        assert [t for t in fake_device.transfers if t.kind == "d2h" and t.bytes > 64] == []
    assert all(weight.is_inference() for weight in component.parameters())
    values = snapshot(component)
    for turn in range(2):
        manager.load_all_layers()
        with torch.inference_mode():
            component.blocks[1].weight.fill_(turn)
            component.blocks[2].weight.data[0, 0] = turn
        manager.release_all()
        values["blocks.1.weight"].fill_(turn)
        values["blocks.2.weight"][0, 0] = turn
        assert_same_bits(snapshot(component), values)


@pytest.mark.parametrize("state", ["released", "loaded"])
@pytest.mark.parametrize("way", ["forward", "apart", "prepare"])
def test_a_conversion_of_layers_is_honoured(fake_device: FakeDevice, tokens: Tensor, state: str, way: str) -> None:
    component, manager = streamed(fake_device)
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in snapshot(component).items()}
    if state == "loaded":
        manager.load_all_layers()
    component.to(torch.bfloat16)
    if way == "prepare":
        component.prepare_for_next_req()
    elif way == "apart":
        assert component.blocks[3].weight.sum().dtype == torch.bfloat16
    assert component(tokens).dtype == torch.bfloat16
    manager.release_all()
    assert on_device(manager, component) == []
    assert_same_bits(snapshot(component), wanted)


@pytest.mark.parametrize("way", ["restore", "prepare", "disable"])
def test_a_layer_that_got_other_data_may_be_parked_with_it(fake_device: FakeDevice, tokens: Tensor, way: str) -> None:
    component, manager = streamed(fake_device, parking="always")
    manager.load_all_layers()
    component.blocks[1].weight.data = torch.full((64, 64), 0.125, device=fake_device.device)
    values = snapshot(component)
    component.park_non_layer_weights()
    assert_same_bits(snapshot(component), values)
    manager.release_all()
    assert_same_bits(snapshot(component), values)
    if way == "disable":
        component.disable_layerwise_offload()
        assert {type(weight) for weight in component.parameters()} == {nn.Parameter}
    if way == "prepare":
        component.prepare_for_next_req()  # the layer has it again
        manager.release_all()
        manager.prefetch_layer(1)
    component.restore_non_layer_weights() if way != "disable" else None
    component(tokens)
    manager.release_all()
    assert_same_bits(snapshot(component), values)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_the_host_has_no_memory_for_is_not_lost(
    fake_device: FakeDevice, tokens: Tensor, write: str
) -> None:
    component, manager = streamed(fake_device)
    manager.release_all()
    values, idle = snapshot(component), fake_device.requested
    manager.load_all_layers()
    for name in ("blocks.1.bias", "blocks.1.weight"):
        weight = component.get_parameter(name)
        WRITES[write](weight, torch.full(weight.shape, 0.125, device=fake_device.device))
        values[name].fill_(0.125)
    for k in (1, 2):
        fake_device.fail_host_copy(after=k)
        with pytest.raises(MemoryError):
            manager.release_all()
        assert_same_bits(snapshot(component), values)
        component(tokens)
    manager.release_all()
    assert fake_device.requested == idle
    assert_same_bits(snapshot(component), values)


def test_a_layer_that_was_read_while_it_came_is_not_written_back(fake_device: FakeDevice) -> None:
    component, manager = streamed(fake_device)
    manager.prefetch_layer(2)
    component.state_dict()
    manager.prefetch_layer(2, non_blocking=False)
    fake_device.clear_transfers()
    manager.release_all()
    assert fake_device.transfers == []


def test_a_loaded_weight_copies_as_what_it_is(fake_device: FakeDevice) -> None:
    component, manager = streamed(fake_device)
    manager.load_all_layers()
    values = snapshot(component)
    for twin in (copy.deepcopy(component.blocks), pickle.loads(pickle.dumps(component.blocks))):
        assert {type(weight) for weight in twin.parameters()} == {nn.Parameter}
        assert_same_bits({f"blocks.{name}": w for name, w in twin.state_dict().items()} | values, values)
    component.disable_layerwise_offload()
    assert {type(weight) for weight in component.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("settings", [{}, {"resident_layers": 6}])
def test_nothing_but_the_layers_is_transferred_for_a_forward(
    fake_device: FakeDevice, tokens: Tensor, settings: dict[str, object]
) -> None:
    component, _ = streamed(fake_device, **settings)
    component.prepare_for_next_req()
    fake_device.clear_transfers()
    component(tokens)
    assert {t.kind for t in fake_device.transfers} <= {"h2d"}  # no value is read: the host never waits for the device


SHARED = ("0.weight", "1.weight", "2.weight")


@pytest.mark.parametrize("resident", [0, 6])
def test_unchanged_layers_are_not_written_back(fake_device: FakeDevice, tokens: Tensor, resident: int) -> None:
    component, manager = streamed(fake_device, resident_layers=resident)
    component.prepare_for_next_req()
    component(tokens)
    manager.load_all_layers()
    fake_device.clear_transfers()
    manager.release_all()
    assert [t for t in fake_device.transfers if t.kind == "d2h" and t.bytes > 64] == []


@pytest.mark.parametrize("pin", [False, True])
def test_layers_are_pinned_only_on_request(fake_device: FakeDevice, tokens: Tensor, pin: bool) -> None:
    component, _ = streamed(fake_device, pin_memory=pin)
    fake_device.clear_transfers()
    component(tokens)
    layers = [t for t in fake_device.transfers if t.kind == "h2d"]
    assert {(t.pinned, t.blocking) for t in layers} == {(pin, not pin)}


class Wide(nn.Module):
    """Two lists of layers, whose weights are a little larger than a power of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(260, 260) for _ in range(8)) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in [*self.first, *self.second]:
            rows = layer(rows).sin()
        return rows


def wide(device: FakeDevice, pin_memory: bool | int | str) -> tuple[nn.Module, int, Tensor, Tensor]:
    """The component, the bytes of its layers, rows for it, and what comes of them."""
    torch.manual_seed(0)
    component = Wide().requires_grad_(False)
    rows = torch.randn(3, 260)
    expected = component(rows)
    config = OffloadConfig(pin_memory=pin_memory)
    layerwise_offloadable(component, ["first", "second"], config=config, device=device.device)
    return component, sum(weight.nbytes for weight in component.parameters()), rows.to(device.device), expected


def test_pinned_layers_take_hardly_more_memory_than_they_have_bytes(fake_device: FakeDevice) -> None:
    component, size, rows, expected = wide(fake_device, pin_memory=True)
    assert size <= pinned_bytes() < 1.25 * size  # each weight alone would be rounded up to twice its bytes
    fake_device.clear_transfers()
    torch.testing.assert_close(component(rows).cpu(), expected)
    assert {t.pinned for t in fake_device.transfers if t.kind == "h2d"} == {True}
    component.disable_layerwise_offload()
    gc.collect()
    assert pinned_bytes() == 0


@pytest.mark.parametrize(("budget", "pinned"), [(0, 0), (1024, 0), ("4 KiB", 4096), ("3 MiB", 3 << 20)])
def test_no_more_is_pinned_than_the_budget_of_the_component(
    fake_device: FakeDevice, caplog: pytest.LogCaptureFixture, budget: int | str, pinned: int
) -> None:
    component, size, rows, expected = wide(fake_device, pin_memory=budget)
    assert pinned_bytes() == pinned
    groups = [parked_group(weight) for weight in component.parameters()]
    held = sum(group.nbytes for group in groups if group.host.kind == "pinned")
    assert 0.75 * pinned <= held <= pinned
    assert ("of layers stay in pageable memory" in caplog.text) is (budget != 0 and held < size)
    torch.testing.assert_close(component(rows).cpu(), expected)


def test_half_of_what_the_host_can_give_may_be_pinned(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("park_core.pinned.host_headroom", lambda: HostHeadroom(2 << 20, 2 << 20))
    component, *_ = wide(fake_device, pin_memory=True)
    assert pinned_bytes() == 1 << 20
    del component


def test_a_system_that_pins_nothing_leaves_layers_pageable(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refuse(*args: object, **kwargs: object) -> Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("cannot pin")
        return empty(*args, **kwargs)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(torch, "empty", refuse)
    component, _, rows, expected = wide(fake_device, pin_memory=True)
    assert "cannot pin" in caplog.text
    torch.testing.assert_close(component(rows).cpu(), expected)


def test_a_weight_that_others_reach_is_not_streamed(fake_device: FakeDevice, tokens: Tensor) -> None:
    torch.manual_seed(0)
    component = Denoiser().eval().requires_grad_(False)
    component.blocks[1].weight = component.blocks[0].weight  # tied between two layers
    component.project = nn.Linear(64, 64)
    component.project.weight = component.blocks[2].weight  # tied to a non-layer weight
    expected = component.to(fake_device.device)(tokens)
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    assert torch.equal(component(tokens), expected)
    assert component.blocks[1].weight is component.blocks[0].weight
    assert on_device(component.layerwise_offload_managers[0], component) == []  # their biases are released
    assert not is_parked(component.project.weight)
    weights = {w for name, w in component.named_parameters() if not name.startswith("blocks") or name[7:] in SHARED}
    report = component.park_non_layer_weights()
    assert report.bytes_freed == sum(weight.nbytes for weight in weights)
    assert {skipped.name for skipped in report.skipped} == {"position"}
    component.restore_non_layer_weights()
    assert torch.equal(component(tokens), expected)


def test_buffers_of_layers_stay_on_the_device(fake_device: FakeDevice) -> None:
    component = nn.ModuleDict({"blocks": nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))})
    layerwise_offloadable(component, ["blocks"], config=ALWAYS, device=fake_device.device)
    pointers = [buffer.data_ptr() for buffer in component.buffers()]
    assert {buffer.device for buffer in component.buffers()} == {fake_device.device}
    component.layerwise_offload_managers[0].load_all_layers()
    component.layerwise_offload_managers[0].release_all()
    component.park_non_layer_weights()
    assert [buffer.data_ptr() for buffer in component.buffers()] == pointers


def test_settings_can_be_changed_at_any_time(fake_device: FakeDevice, tokens: Tensor) -> None:
    component, _ = streamed(fake_device)
    values, expected, idle = snapshot(component), component(tokens), fake_device.requested - 12 * 100 * 4
    component.park_non_layer_weights(need=1 << 50)
    component.configure_layerwise_offload(OffloadConfig(resident_layers=2), device=fake_device.device)
    assert torch.equal(component(tokens), expected)
    component.layer_names = ()
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    assert not any(is_parked(weight) for weight in component.parameters())
    assert not any(hook for block in component.blocks for hook in (block._forward_hooks, block._forward_pre_hooks))
    component.layer_names = ("blocks",)
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    assert torch.equal(component(tokens), expected)
    assert_same_bits(snapshot(component), values)
    assert fake_device.requested >= idle


Clone = Callable[[nn.Module], nn.Module]


class Foreign(nn.Module):
    """A class of another library, which knows nothing of us."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.stages = nn.ModuleList([nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), nn.Linear(8, 8)])
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.stem(rows)
        for stage in [*self.stages, *self.layers]:
            rows = stage(rows)
        return rows


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_an_offloadable_module_is_a_module_of_its_own(fake_device: FakeDevice, clone: Clone) -> None:
    component = layerwise_offloadable(Foreign(), None, config=ALWAYS, device=fake_device.device)
    component.park_non_layer_weights()
    twin = clone(component)
    assert len(component.layerwise_offload_managers) == 1
    assert len(twin.layerwise_offload_managers) == 0
    with pytest.raises(ParkError, match="configure_layerwise_offload"):
        twin.park_non_layer_weights()
    twin.configure_layerwise_offload(ALWAYS)
    twin.park_non_layer_weights()
    twin.restore_non_layer_weights()
    component.restore_non_layer_weights()
    assert_same_bits(snapshot(twin), snapshot(component))


def test_a_module_that_has_the_methods_keeps_its_own(fake_device: FakeDevice, tokens: Tensor) -> None:
    component = Denoiser().eval().requires_grad_(False)
    assert layerwise_offloadable(component, None, device=fake_device.device) is component
    assert "park_non_layer_weights" not in vars(component)
    assert len(component.layerwise_offload_managers) == 1
    component(tokens)


def test_a_module_of_another_library_stays_what_it_is(fake_device: FakeDevice) -> None:
    component = Foreign().requires_grad_(False)
    rows = torch.ones(2, 8, device=fake_device.device)
    expected = component.to(fake_device.device)(rows)
    same = layerwise_offloadable(component, None, config=ALWAYS, device=fake_device.device, component_name="foreign")
    assert same is component
    assert type(component) is Foreign
    assert tuple(component.layer_names) == ("layers",)
    for _ in range(2):
        component.park_non_layer_weights()
        component.restore_non_layer_weights()
        component.prepare_for_next_req()
        assert torch.equal(component(rows), expected)


def test_disabling_while_parked_leaves_a_plain_module(fake_device: FakeDevice, tokens: Tensor) -> None:
    component, manager = streamed(fake_device, parking="always")
    values, expected = snapshot(component), component(tokens)
    parking = offload_of(component).parking
    component.park_non_layer_weights()
    fake_device.fail_allocation(after=4)
    with pytest.raises(torch.OutOfMemoryError):
        component.disable_layerwise_offload()
    component.disable_layerwise_offload()
    component.disable_layerwise_offload()
    assert_same_bits(snapshot(component), values)
    assert component.layerwise_offload_managers == []
    assert not any(is_parked(weight) for weight in component.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in component.modules())
    assert [group_of(weight.untyped_storage()).host for weight in component.parameters() if weight.dim()] == [None] * 15
    resident = fake_device.requested
    manager.release_all()  # old handles do nothing
    manager.prefetch_layer(0)
    assert parking.park().decision.verdict == "keep"
    assert fake_device.requested == resident
    assert torch.equal(component(tokens), expected)


def test_a_component_that_is_gone_leaves_no_host_copy(fake_device: FakeDevice) -> None:
    component = Denoiser(blocks=6).eval().requires_grad_(False)
    on_the_host = [weakref.ref(weight.untyped_storage()) for weight in component.blocks.parameters()]
    component.configure_layerwise_offload(MEMORY, device=fake_device.device)
    assert all(storage() is not None for storage in on_the_host)
    del component
    gc.collect()
    assert [storage for storage in on_the_host if storage() is not None] == []
