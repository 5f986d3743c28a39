"""A host copy saves the next transfer when, and only when, it is still what is on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import ALWAYS, assert_same_bits, bits, snapshot
from park_core import OffloadConfig, Parking, layerwise_offloadable
from park_core.fingerprint import _keys, fingerprints, known_fingerprints
from park_core.storage import group_of
from pytest_park.fakegpu import FakeDevice, activate
from pytest_park.fakegpu.pinned import pinned_bytes


class Weights(nn.Module):
    """Three weights over three storages; the sizes are no multiples of a word."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(35.0, device=device).view(5, 7), requires_grad=False)
        self.second = nn.Parameter(torch.ones(9, dtype=torch.bfloat16, device=device), requires_grad=False)
        self.third = nn.Parameter(torch.ones(3, dtype=torch.uint8, device=device), requires_grad=False)


@pytest.fixture
def component(fake_device: FakeDevice) -> Weights:
    return Weights(fake_device.device)


def moved(device: FakeDevice, verb: Callable[[], object]) -> int:
    """Bytes of weights that ``verb`` moves to the host."""
    device.clear_transfers()
    report = verb()
    return report.bytes_to_host  # type: ignore[attr-defined,no-any-return]


def test_unchanged_weights_are_not_transferred_again(fake_device: FakeDevice, component: Weights) -> None:
    values = snapshot(component)
    parking = Parking(component, "component", ALWAYS)
    everything = sum(weight.nbytes for weight in component.parameters())
    assert moved(fake_device, parking.park) == everything
    for _ in range(3):
        parking.restore()
        assert moved(fake_device, parking.park) == 0
        assert fake_device.requested == 0
    parking.restore()
    assert all(torch.equal(tensor, values[name]) for name, tensor in snapshot(component).items())


WRITERS: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "add_": lambda w, x: w.copy_(x),
    "data.copy_": lambda w, x: w.data.copy_(x),
    "data =": lambda w, x: setattr(w, "data", x.clone()),
    "one bit": lambda w, x: w.data.view(torch.uint8)[..., 0].bitwise_xor_(1),
    "one value swapped": lambda w, x: w.data.view(-1)[[0, 1]].copy_(w.data.view(-1)[[1, 0]]),
    "filled": lambda w, x: w.data.fill_(3),
}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", ["first", "second", "third"])
@pytest.mark.parametrize("when", ["before the first park", "resident after a cycle", "parked"])
def test_a_write_is_never_lost(fake_device: FakeDevice, component: Weights, write: str, name: str, when: str) -> None:
    parking = Parking(component, "component", ALWAYS)
    if when != "before the first park":
        parking.park()
    if when == "resident after a cycle":
        parking.restore()
    weight = component.get_parameter(name)
    for turn in range(2):
        value = torch.full_like(weight.data, turn + 5, device=fake_device.device)
        WRITERS[write](weight.detach() if when == "parked" and write == "add_" else weight, value)
        expected = bits(weight)
        parking.park()
        parking.restore()
        assert torch.equal(bits(weight), expected)
        if when == "parked":
            parking.park()


def test_load_state_dict_between_uses_is_not_undone(fake_device: FakeDevice, component: Weights) -> None:
    parking = Parking(component, "component", ALWAYS)
    for assign in (False, True):
        parking.park()
        parking.restore()
        wanted = {name: tensor.add(1).to(fake_device.device) for name, tensor in snapshot(component).items()}
        component.load_state_dict(wanted, assign=assign)
        parking.park()
        parking.restore()
        assert all(torch.equal(tensor, wanted[name].cpu()) for name, tensor in snapshot(component).items())


@pytest.mark.parametrize("second_while", ["parked", "resident"])
def test_of_two_sets_of_values_the_one_loaded_last_is_kept(component: Weights, second_while: str) -> None:
    parking = Parking(component, "component", ALWAYS)
    first = snapshot(component)
    second = {name: tensor.add(1) for name, tensor in first.items()}
    parking.park()
    parking.restore()
    if second_while == "parked":
        parking.park()
    component.load_state_dict(second)
    parking.restore() if second_while == "parked" else parking.park()
    component.load_state_dict(first)
    parking.restore()
    parking.park()
    parking.restore()
    assert_same_bits(snapshot(component), first)


def test_a_snapshot_taken_while_parked_is_not_the_weight_afterwards(component: Weights) -> None:
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    state = component.state_dict()
    parking.restore()
    state["first"].zero_()
    parking.park()
    parking.restore()
    assert component.first.sum() == sum(range(35))
    with torch.no_grad():
        component.first.add_(1)
    parking.park()
    assert state["first"].sum() == 0


@pytest.mark.parametrize("keep", [False, True])
def test_host_copies_follow_the_setting(component: Weights, keep: bool) -> None:
    parking = Parking(component, "component", OffloadConfig(parking="always", keep_host_copies=keep))
    parking.park()
    parking.restore()
    groups = [group_of(weight.untyped_storage()) for weight in component.parameters()]
    assert [group is not None and group.host is not None for group in groups] == [keep] * 3


def test_immutable_weights_are_not_even_looked_at(fake_device: FakeDevice, component: Weights) -> None:
    parking = Parking(component, "component", OffloadConfig(parking="always", immutable_weights=True))
    parking.park()
    parking.restore()
    allocations = fake_device.allocations
    assert moved(fake_device, parking.park) == 0
    assert fake_device.allocations == allocations
    assert fake_device.transfers == []


def test_without_room_for_a_look_everything_is_transferred(fake_device: FakeDevice, component: Weights) -> None:
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    parking.restore()
    fake_device.fail_allocation()
    everything = sum(weight.nbytes for weight in component.parameters())
    assert moved(fake_device, parking.park) == everything
    fake_device.clear_faults()


def test_on_a_device_without_values_everything_is_transferred() -> None:
    with activate(memory="1 GiB", data=False) as device:
        component = Weights(device.device)
        parking = Parking(component, "component", ALWAYS)
        for _ in range(2):
            report = parking.park()
            assert report.bytes_freed == sum(weight.nbytes for weight in component.parameters())
            parking.restore()


def test_where_values_cannot_be_read_a_fingerprint_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(storages: object) -> None:
        raise NotImplementedError("no values")

    monkeypatch.setattr("park_core.fingerprint.fingerprints", refuse)
    assert known_fingerprints([torch.ones(3)]) == [None]


@pytest.mark.parametrize("words", [1, 2, 5, 1 << 19])
def test_fingerprints_notice_every_change_and_nothing_else(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    monkeypatch.setattr("park_core.fingerprint._WORDS", words)
    torch.manual_seed(0)
    contents = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 7, 8, 9, 64, 101)]
    before = fingerprints(contents)
    assert fingerprints(contents) == before
    for owner, content in enumerate(contents):
        for place in range(0, len(content), 5):
            content[place] ^= 128
            assert [a != b for a, b in zip(before, fingerprints(contents), strict=True)] == [
                other == owner for other in range(len(contents))
            ]
            content[place] ^= 128


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_fingerprint_is_the_same_in_whatever_company(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]) -> None:
    monkeypatch.setattr("park_core.fingerprint._WORDS", 2)
    contents = [torch.arange(size, dtype=torch.uint8) for size in (3, 27, 11)]  # chunks of 8, and 3 at the end
    alone = [fingerprints([content])[0] for content in contents]
    assert fingerprints([contents[i] for i in order]) == [alone[i] for i in order]


class Given(TorchDispatchMode):
    """What kernels are given, views apart: the storages, and bytes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.UntypedStorage, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.seen += [(t.untyped_storage(), t.nbytes) for t in args if isinstance(t, Tensor)]
        return func(*args, **(kwargs or {}))


def test_a_fingerprint_reads_a_weight_once_and_works_in_buffers_that_fit_a_cache() -> None:
    weight = torch.ones(3 * 2**20)
    with Given() as given:
        fingerprints([weight])
    assert sum(nbytes for storage, nbytes in given.seen if storage is weight.untyped_storage()) == weight.nbytes
    assert max(s.nbytes() for s, _ in given.seen if s is not weight.untyped_storage()) == 4 * 2**20


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "filled with another value": lambda w: w.fill_(0.5),
    "rows swapped": lambda w: w.index_copy_(0, torch.tensor([3, 4]), w[[4, 3]]),
    "negated": lambda w: w.neg_(),
    "two signs": lambda w: w[:2, 0].neg_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fingerprints_notice_what_simple_sums_miss(change: str, dtype: torch.dtype) -> None:
    weight = torch.arange(64.0, dtype=dtype).add(1).view(64, 1).repeat(1, 8)
    before = fingerprints([weight])
    CHANGES[change](weight)
    assert fingerprints([weight]) != before


def test_the_key_of_a_place_depends_on_nothing_else() -> None:
    keys = {size: _keys(torch.empty(size, dtype=torch.int64)) for size in (1, 10, 1000)}
    assert torch.equal(keys[10], keys[1000][:10])
    assert bool((keys[1000] % 2 == 1).all())
    assert keys[1000].unique().numel() == 1000


@pytest.mark.parametrize("settings", [{"staging": False}, {"pin_memory": True}])
def test_host_copies_are_on_the_host_whatever_the_default_device_is(
    fake_device: FakeDevice, settings: dict[str, object]
) -> None:
    component = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), "head": nn.Linear(8, 8)})
    component.to(fake_device.device).requires_grad_(False)
    values = snapshot(component)
    with fake_device.device:
        config = OffloadConfig(parking="always", **settings)  # type: ignore[arg-type]
        layerwise_offloadable(component, ["layers"], config=config)
        component.park_non_layer_weights()
        for manager in component.layerwise_offload_managers:
            manager.load_all_layers()
            component["layers"][0].weight.mul_(1)
            manager.release_all()
    assert fake_device.requested == 0
    assert {value.device.type for value in component.state_dict().values()} == {"cpu"}
    assert (pinned_bytes() > 0) is bool(settings.get("pin_memory"))
    assert_same_bits(snapshot(component), values)
