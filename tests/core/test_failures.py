"""Whatever fails, and whenever: all parked or all resident, never mixed, and the next try works."""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import Denoiser, assert_same_bits, non_layer_weights, snapshot
from park_core import OffloadConfig, Parking
from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import FakeDevice

FAULTS = {
    "host copy": ("fail_host_copy", MemoryError),
    "device copy": ("fail_device_copy", torch.OutOfMemoryError),
    "allocation": ("fail_allocation", torch.OutOfMemoryError),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@pytest.mark.parametrize("verb", ["park", "restore"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_failure_at_every_point_changes_nothing(
    fake_device: FakeDevice, fault: str, error: type[BaseException] | None, verb: str, keep: bool
) -> None:
    component = Denoiser().to(fake_device.device).requires_grad_(False)
    values, resident = snapshot(component), fake_device.requested
    parking = Parking(component, "denoiser", OffloadConfig(parking="always", keep_host_copies=keep))
    inject, default = FAULTS[fault]
    expected_error = error or default
    failed = 0
    for k in itertools.count(1):
        parking.park() if verb == "restore" else parking.restore()
        before = fake_device.requested
        getattr(fake_device, inject)(after=k, error=error() if error else None)
        try:
            getattr(parking, verb)()
        except expected_error:
            failed += 1
            assert fake_device.requested == before
            assert {is_parked(weight) for weight in component.parameters()} == {verb == "restore"}
            assert_same_bits(snapshot(component), values)
            getattr(parking, verb)()  # a retry works
        else:
            break
        finally:
            fake_device.clear_faults()
    assert fake_device.requested == (64 * 4 if verb == "park" else resident)
    if not keep:
        assert failed == (12 if (fault == "host copy") == (verb == "park") else 0)
    parking.restore()
    assert_same_bits(snapshot(component), values)


@pytest.mark.parametrize(("verb", "swap"), [("park", "hide"), ("restore", "show")])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_an_interrupt_in_the_middle_of_the_swaps_changes_nothing(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, verb: str, swap: str, k: int
) -> None:
    component = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(fake_device.device).requires_grad_(False)
    values, countdown = snapshot(component), [k]
    parking = Parking(component, "component", OffloadConfig(parking="always"))
    if verb == "restore":
        parking.park()
    before, original = fake_device.requested, pkgutil.resolve_name(f"park_core.parking.{swap}")

    def interrupted(*args: object) -> None:
        original(*args)
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(f"park_core.parking.{swap}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(parking, verb)()
    assert {is_parked(weight) for weight in component.parameters()} == {verb == "restore"}
    assert fake_device.requested == before
    assert_same_bits(snapshot(component), values)
    getattr(parking, verb)()
    parking.restore()
    assert_same_bits(snapshot(component), values)


@pytest.mark.parametrize("source", ["the host", "the device"])
def test_a_failure_while_configuring_changes_nothing(fake_device: FakeDevice, source: str) -> None:
    component = Denoiser().requires_grad_(False)
    if source == "the device":
        component.to(fake_device.device)
    values, before = snapshot(component), fake_device.requested
    inject = fake_device.fail_host_copy if source == "the device" else fake_device.fail_allocation
    for k in range(1, 5):
        inject(after=k)
        with pytest.raises((MemoryError, torch.OutOfMemoryError)):
            component.configure_layerwise_offload(device=fake_device.device)
        assert fake_device.requested == before
        assert not any(is_parked(weight) for weight in component.parameters())
        assert not any(module._forward_pre_hooks for module in component.modules())
        assert_same_bits(snapshot(component), values)
    component.configure_layerwise_offload(device=fake_device.device)
    component(torch.arange(3, device=fake_device.device))


def test_parking_needs_no_device_memory(denoiser: Denoiser, headroom: Callable[[int], int]) -> None:
    headroom(0)
    weights = sum(weight.nbytes for weight in non_layer_weights(denoiser).values())
    assert denoiser.park_non_layer_weights().bytes_freed == weights


def test_after_a_failed_restore_a_park_frees_everything(fake_device: FakeDevice, denoiser: Denoiser) -> None:
    values = snapshot(denoiser)
    denoiser.park_non_layer_weights(need=1 << 50)
    idle = fake_device.requested
    fake_device.fail_allocation(after=2)
    with pytest.raises(torch.OutOfMemoryError):
        denoiser.restore_non_layer_weights()
    assert denoiser.park_non_layer_weights(need=1 << 50).bytes_freed == 0
    assert fake_device.requested == idle
    denoiser.restore_non_layer_weights()
    assert_same_bits(snapshot(denoiser), values)


def test_a_headroom_probe_that_raises_changes_nothing(
    fake_device: FakeDevice, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device, *, request: int) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr("park_core.decision.device_headroom", broken)
    before = fake_device.requested
    with pytest.raises(RuntimeError, match="no driver"):
        denoiser.park_non_layer_weights()
    assert fake_device.requested == before
    assert not any(is_parked(weight) for weight in non_layer_weights(denoiser).values())


def test_restore_takes_no_more_than_the_missing_weights(fake_device: FakeDevice, denoiser: Denoiser) -> None:
    resident = fake_device.requested
    denoiser.park_non_layer_weights(need=1 << 50)
    fake_device.reset_peak()
    denoiser.restore_non_layer_weights()
    assert fake_device.requested == resident
    assert fake_device.peak_allocated == fake_device.allocated
