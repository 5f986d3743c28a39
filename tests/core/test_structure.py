"""What happens to the tree of a component while it is parked is honoured, and owners who share get along."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conftest import ALWAYS, assert_same_bits, snapshot
from park_core import OffloadConfig, Parking, WeightsParkedError
from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import FakeDevice
from tests.lacking import without_swap


class Adapter(nn.Module):
    """Wraps a layer as LoRA libraries do."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Parameter(torch.zeros(2, base_layer.in_features, device=base_layer.weight.device))
        self.up = nn.Parameter(torch.ones(base_layer.out_features, 2, device=base_layer.weight.device))

    def forward(self, rows: Tensor) -> Tensor:
        return self.base_layer(rows) + rows @ self.down.t() @ self.up.t()


@pytest.fixture
def component(fake_device: FakeDevice) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False).to(fake_device.device)


@pytest.fixture
def rows(fake_device: FakeDevice) -> Tensor:
    return torch.ones(2, 4, device=fake_device.device)


def test_a_layer_that_was_wrapped_while_parked_gets_its_data_back(component: nn.Sequential, rows: Tensor) -> None:
    expected = component(rows)
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    component[0] = Adapter(component[0])
    with pytest.raises(WeightsParkedError):
        component(rows)
    parking.restore()
    assert torch.equal(component(rows), expected)
    parking.park()
    component[0] = component[0].base_layer
    parking.restore()
    assert torch.equal(component(rows), expected)


def test_a_parameter_that_was_replaced_while_parked_wins(
    component: nn.Sequential, rows: Tensor, fake_device: FakeDevice
) -> None:
    parking = Parking(component, "component", ALWAYS, fake_device.device)
    parking.park()
    component[0].weight = nn.Parameter(torch.eye(4), requires_grad=False)
    component[0].bias = nn.Parameter(torch.zeros(4, device=fake_device.device), requires_grad=False)
    parking.restore()
    assert {weight.device for weight in component.parameters()} == {fake_device.device}
    assert torch.equal(component[0](rows), rows)
    parking.park()
    parking.restore()
    assert torch.equal(component[0](rows), rows)


def test_a_parameter_that_was_deleted_while_parked_takes_its_host_copy_along(component: nn.Sequential) -> None:
    import weakref

    parking = Parking(component, "component", ALWAYS)
    parking.park()
    host = weakref.ref(component[1].weight._parked.group.host.storage)
    del component[1]
    assert host() is None
    parking.restore()
    assert not any(is_parked(weight) for weight in component.parameters())


def test_a_parameter_outside_the_tree_is_restored_too(component: nn.Sequential, fake_device: FakeDevice) -> None:
    values = snapshot(component)
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    kept = component[1]
    del component[1]
    parking.restore()
    assert not is_parked(kept.weight)
    assert torch.equal(kept.weight.cpu(), values["1.weight"])


def test_new_weights_are_parked_with_the_others(component: nn.Sequential, fake_device: FakeDevice) -> None:
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    component.append(nn.Linear(4, 4).to(fake_device.device))
    report = parking.park()
    assert report.bytes_freed == 20 * 4
    assert fake_device.requested == 0
    parking.restore()
    assert not any(is_parked(weight) for weight in component.parameters())


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("restored", ["a", "b", "ab", "ba"])
@pytest.mark.parametrize("tied", ["module", "parameter", "storage"])
def test_what_two_components_share_is_parked_when_both_released_it(
    fake_device: FakeDevice, rows: Tensor, order: str, restored: str, tied: str
) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4).requires_grad_(False).to(fake_device.device)
    components = {"a": nn.Sequential(shared, nn.Linear(4, 4)), "b": nn.Sequential(nn.Linear(4, 4), nn.Identity())}
    if tied == "module":
        components["b"].append(shared)
    else:
        components["b"].append(nn.Linear(4, 4))
        weight = shared.weight if tied == "parameter" else nn.Parameter(shared.weight.data, requires_grad=False)
        components["b"][2].weight, components["b"][2].bias = weight, shared.bias
        del weight
    for component in components.values():
        component.to(fake_device.device).requires_grad_(False)
    expected = {name: component(rows).cpu() for name, component in components.items()}
    values = {name: snapshot(component) for name, component in components.items()}
    resident = fake_device.requested
    parkings = {name: Parking(component, name, ALWAYS) for name, component in components.items()}
    first, second = order

    parkings[first].park()
    assert torch.equal(components[second](rows).cpu(), expected[second])  # still in use there
    parkings[second].park()
    assert fake_device.requested == rows.nbytes
    for name in restored:
        parkings[name].restore()
        assert torch.equal(components[name](rows).cpu(), expected[name])
    if len(restored) == 2:
        assert fake_device.requested == resident
        assert components["a"][0].weight.data_ptr() == components["b"][2].weight.data_ptr()
    for name in restored:
        parkings[name].park()
    assert fake_device.requested == rows.nbytes
    for name, parking in parkings.items():
        parking.restore()
        assert_same_bits(snapshot(components[name]), values[name])


def test_equal_neighbours_do_not_flip_each_other(fake_device: FakeDevice) -> None:
    config = OffloadConfig(performance_mode="memory", significance=0.5)
    components = [nn.Linear(1024, 1024, bias=False).to(fake_device.device) for _ in range(2)]
    parkings = [Parking(component, "component", config) for component in components]
    fake_device.set_cap(fake_device.allocated + 7 * 1024**2)  # 4 MiB each: significant in 7 MiB, not in 11 MiB
    seen: list[list[str]] = []
    for _ in range(5):
        verdicts = []
        for parking in parkings:
            parking.restore()
            verdicts.append(parking.park().decision.verdict)
        seen.append(verdicts)
    assert seen == [["park", "park"]] * 5


@pytest.mark.parametrize("why", ["gradient", "pending backward"])
def test_weights_that_autograd_needs_are_refused(fake_device: FakeDevice, rows: Tensor, why: str) -> None:
    component = nn.Linear(4, 4).to(fake_device.device)
    loss = component(rows).sum()
    if why == "gradient":
        loss.backward()
    parking = Parking(component, "component", ALWAYS)
    decision = parking.park().decision
    assert decision.verdict == "refuse"
    assert why.split()[-1] in decision.reason
    assert "weight" in decision.reason
    component.zero_grad() if why == "gradient" else loss.backward()
    component.zero_grad()
    del loss
    assert parking.park().decision.verdict == "park"


class Scale(nn.Module):
    """Autograd holds its weight itself, and no view of it as for a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("first", self.weight[:1])  # a view of its own does not count

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.weight


def test_a_frozen_weight_stays_while_a_backward_to_the_inputs_may_need_it(fake_device: FakeDevice) -> None:
    component = nn.Sequential(Scale(), nn.Linear(4, 4, bias=False), nn.PReLU()).requires_grad_(False)
    component.to(fake_device.device)
    component[0].first = component[0].weight[:1]
    parking = Parking(component, "component", ALWAYS)
    leaf = torch.ones(2, 4, device=fake_device.device, requires_grad=True)
    (expected,) = torch.autograd.grad(component(leaf).sum(), leaf)
    output = component(leaf).sum()
    report = parking.park()
    assert {skipped.name for skipped in report.skipped} >= {"0.weight = 0.first", "1.weight", "2.weight"}
    assert torch.equal(*torch.autograd.grad(output, leaf), expected)
    del output
    parking.park()
    assert all(is_parked(weight) for weight in component.parameters())


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "nothing": lambda c: None,
    "replaced": lambda c: setattr(c[0], "weight", nn.Parameter(c[0].weight.new_ones(64, 64))),
    "other data": lambda c: setattr(c[0].weight, "data", c[0].weight.new_ones(64, 64)),
    "other data of another storage": lambda c: setattr(c[0].weight, "data", c[0].weight.new_ones(64, 64)[:1]),
    "resized": lambda c: c[0].weight.untyped_storage().resize_(1000),
    "added": lambda c: c.append(nn.Linear(64, 64).to(c[0].weight.device)),
    "deleted": lambda c: c.__delitem__(1),
    "tied": lambda c: setattr(c[1], "weight", c[0].weight),
    "tied by storage": lambda c: setattr(c[1].weight, "data", c[0].weight.data),
    "moved to the host": lambda c: c[1].to("cpu"),
    "a buffer": lambda c: c[0].register_buffer("table", c[0].weight.new_ones(64, 64)),
}


@pytest.mark.parametrize("change", [pytest.param(c, marks=[without_swap] * (c == "resized")) for c in CHANGES])
def test_the_decision_is_by_the_weights_as_they_are_now(
    component: nn.Sequential, fake_device: FakeDevice, change: str
) -> None:
    parking = Parking(component, "component", OffloadConfig(performance_mode="memory"))
    assert parking.park().decision.bytes == 2 * 20 * 4
    CHANGES[change](component)
    storages = {w.untyped_storage() for w in component.parameters() if w.device == fake_device.device}
    expected = sum(storage.nbytes() for storage in storages)
    decision = parking.park().decision
    assert (decision.verdict, decision.bytes) == ("keep", expected)
    assert {"nothing", "a buffer", "replaced", "added", "deleted"} >= {change} or expected != 2 * 20 * 4
    fake_device.set_cap(fake_device.allocated + 64 * 10)
    del storages
    report = parking.park()
    assert (report.decision.verdict, report.decision.bytes) == ("park", expected)
    assert report.bytes_freed == expected


class PackedWeight(nn.Parameter):
    """Keeps its scales in attributes, as the weights of bitsandbytes do."""

    quant_state: QuantState
    offset: Tensor


class QuantState:
    def __init__(self, absmax: Tensor) -> None:
        self.absmax, self.blocksize = absmax, 64


def test_what_a_weight_has_in_its_attributes_stays_with_it_and_is_named(fake_device: FakeDevice) -> None:
    component = nn.Module()
    packed = torch.arange(64, dtype=torch.uint8, device=fake_device.device)
    weight = component.weight = PackedWeight(packed, requires_grad=False)
    del packed
    weight.quant_state = state = QuantState(torch.ones(4, device=fake_device.device))
    weight.offset = torch.ones(2, device=fake_device.device)
    parking = Parking(component, "component", ALWAYS)
    for _ in range(2):
        report = parking.park()
        assert report.bytes_freed == 64
        assert sorted(report.skipped) == [
            ("weight.offset", "an attribute of a weight", 8),
            ("weight.quant_state.absmax", "an attribute of a weight", 16),
        ]
        parking.restore()
        assert component.weight is weight
        assert (type(weight), weight.quant_state) == (PackedWeight, state)
        assert torch.equal(weight.cpu(), torch.arange(64, dtype=torch.uint8))
