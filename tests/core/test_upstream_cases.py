"""The cases that upstream tests, by value and on a device that is not the CPU; and the one that it shipped broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conftest import ALWAYS, MEMORY, Denoiser, assert_same_bits, non_layer_weights, snapshot
from park_core import ComponentResidencyManager, OffloadConfig, PerformanceMode, WeightsParkedError
from park_core.parked_tensor import is_parked
from park_core.storage import group_of
from pytest_park.fakegpu import FakeDevice

Headroom = Callable[[int], int]


@pytest.mark.parametrize("mode", PerformanceMode)
def test_parking_follows_the_performance_mode(
    fake_device: FakeDevice, headroom: Headroom, mode: PerformanceMode
) -> None:
    component = Denoiser()
    component.configure_layerwise_offload(OffloadConfig(performance_mode=mode), device=fake_device.device)
    headroom(1024)
    before = fake_device.requested
    report = component.park_non_layer_weights()
    parks = mode is PerformanceMode.MEMORY
    assert report.decision.verdict == ("park" if parks else "keep")
    assert (fake_device.requested < before) == parks
    assert all(is_parked(weight) == parks for weight in non_layer_weights(component).values())


def test_streamed_layer_weights_are_left_alone(denoiser: Denoiser, crowded: Callable[[], None]) -> None:
    manager = denoiser.layerwise_offload_managers[0]
    manager.load_all_layers()
    before = {name: (weight.data_ptr(), weight.cpu()) for name, weight in denoiser.blocks.named_parameters()}
    crowded()
    assert denoiser.park_non_layer_weights().decision.verdict == "park"
    for name, weight in denoiser.blocks.named_parameters():
        address, values = before[name]
        assert weight.data_ptr() == address
        assert torch.equal(weight.cpu(), values)


def test_outside_memory_mode_nothing_moves(fake_device: FakeDevice, headroom: Headroom) -> None:
    component = Denoiser()
    component.configure_layerwise_offload(OffloadConfig(performance_mode="speed"), device=fake_device.device)
    headroom(1024)
    fake_device.clear_transfers()
    addresses = {name: weight.data_ptr() for name, weight in non_layer_weights(component).items()}
    component.park_non_layer_weights()
    assert fake_device.transfers == []
    assert {name: weight.data_ptr() for name, weight in non_layer_weights(component).items()} == addresses


def test_with_room_it_is_skipped(fake_device: FakeDevice, denoiser: Denoiser, headroom: Headroom) -> None:
    headroom(10 * 1024**2)
    fake_device.clear_transfers()
    report = denoiser.park_non_layer_weights()
    assert report.decision.verdict == "keep"
    assert report.bytes_freed == report.bytes_to_host == 0
    assert fake_device.transfers == []


def test_under_pressure_it_happens(fake_device: FakeDevice, denoiser: Denoiser, crowded: Callable[[], None]) -> None:
    crowded()
    weights = sum(weight.nbytes for weight in non_layer_weights(denoiser).values())
    before = fake_device.requested
    report = denoiser.park_non_layer_weights()
    assert report.decision.verdict == "park"
    assert report.bytes_freed == report.bytes_to_host == weights == before - fake_device.requested


def test_host_copies_are_given_back_when_room_appears(denoiser: Denoiser, headroom: Headroom) -> None:
    headroom(1024)
    denoiser.park_non_layer_weights()
    headroom(10 * 1024**2)
    denoiser.restore_non_layer_weights()
    denoiser.park_non_layer_weights()
    assert host_bytes(denoiser) == 0


def test_placeholders_are_shared_per_device_and_dtype(fake_device: FakeDevice, crowded: Callable[[], None]) -> None:
    component = Denoiser()
    component.norm.to(torch.float16)
    component.configure_layerwise_offload(MEMORY, device=fake_device.device)
    crowded()
    component.park_non_layer_weights()
    shown: dict[torch.dtype, set[int]] = {}
    for weight in non_layer_weights(component).values():
        shown.setdefault(weight.dtype, set()).add(weight.untyped_storage()._cdata)
    assert {dtype: len(storages) for dtype, storages in shown.items()} == {torch.float32: 1, torch.float16: 1}


@pytest.mark.parametrize("room", [0, 10, 4096, 10 * 1024**2])
def test_a_second_park_keeps_the_memory_free_and_the_weights_safe(
    fake_device: FakeDevice, denoiser: Denoiser, headroom: Headroom, room: int
) -> None:
    values = snapshot(denoiser)
    headroom(1024)
    assert denoiser.park_non_layer_weights().bytes_freed > 0
    headroom(room)
    parked, allocations = fake_device.requested, fake_device.allocations
    fake_device.clear_transfers()
    for _ in range(2):
        report = denoiser.park_non_layer_weights()
        assert (report.decision.verdict, report.bytes_freed) == ("park", 0)
        assert fake_device.requested == parked
    assert (fake_device.allocations, fake_device.transfers) == (allocations, [])
    headroom(10 * 1024**2)
    denoiser.restore_non_layer_weights()
    assert_same_bits(snapshot(denoiser), values)
    assert not any(is_parked(weight) for weight in non_layer_weights(denoiser).values())


def test_the_end_of_a_request_keeps_parked_weights_parked(
    fake_device: FakeDevice, denoiser: Denoiser, tokens: torch.Tensor
) -> None:
    expected = denoiser(tokens)
    denoiser.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    manager = ComponentResidencyManager({"denoiser": denoiser}, device=fake_device.device)
    for _ in range(2):
        manager.begin_request()
        with manager.use("denoiser") as component:
            assert torch.equal(component(tokens), expected)
        idle = fake_device.requested
        manager.finish_request()
        assert fake_device.requested == idle
        with pytest.raises(WeightsParkedError):
            denoiser(tokens)


def host_bytes(component: Denoiser) -> int:
    """Bytes of host copies that parking holds."""
    weights = non_layer_weights(component).values()
    groups = [group_of(weight.untyped_storage()) for weight in weights if not is_parked(weight)]
    return sum(group.nbytes for group in groups if group is not None and group.host is not None)
