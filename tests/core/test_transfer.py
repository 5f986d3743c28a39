"""Large weights go through a few pinned buffers, piece by piece and in order; small ones go directly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import ALWAYS
from park_core import OffloadConfig, Parking
from pytest_park.fakegpu import FakeDevice, activate


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("park_core.transfer._BUFFER_BYTES", 1024)
    monkeypatch.setattr("park_core.transfer._WORTH_STAGING", 2048)


def component_of(device: FakeDevice, *sizes: int) -> nn.Module:
    component = nn.Module()
    for index, size in enumerate(sizes):
        content = (torch.arange(size) % (251 - index)).to(torch.uint8)
        component.register_parameter(f"w{index}", nn.Parameter(content.to(device.device), requires_grad=False))
    return component


@pytest.mark.parametrize("size", [2047, 2048, 5 * 1024, 5 * 1024 + 1, 9000])
def test_a_staged_weight_comes_back_bit_for_bit(fake_device: FakeDevice, size: int) -> None:
    component = component_of(fake_device, size, 100, 3 * size)
    values = [weight.cpu() for weight in component.parameters()]
    parking = Parking(component, "component", ALWAYS)
    for _ in range(2):
        parking.park()
        parking.restore()
        assert all(torch.equal(w.cpu(), v) for w, v in zip(component.parameters(), values, strict=True))
        with torch.no_grad():
            for weight, value in zip(component.parameters(), values, strict=True):
                value.add_(1)
                weight.add_(1)


@pytest.mark.parametrize("default", ["cpu", "fakegpu"])
def test_pieces_are_pinned_and_no_larger_than_a_buffer(fake_device: FakeDevice, default: str) -> None:
    component = component_of(fake_device, 5000, 100)
    parking = Parking(component, "component", ALWAYS)
    for verb, kind in ((parking.park, "d2h"), (parking.restore, "h2d")):
        fake_device.clear_transfers()
        with torch.device(default):
            verb()
        moves = [t for t in fake_device.transfers if t.kind == kind and t.bytes >= 100]
        assert [t.bytes for t in moves] == [1024, 1024, 1024, 1024, 904, 100]
        assert [t.pinned for t in moves] == [True] * 5 + [False]
        assert [t.blocking for t in moves] == [False] * 5 + [True]
        assert len({t.stream for t in moves[:5]}) == 1


@pytest.mark.parametrize("why", ["switched off", "nothing to pin"])
def test_without_staging_weights_go_directly(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    component = component_of(fake_device, 5000)
    parking = Parking(component, "component", OffloadConfig(parking="always", staging=why != "switched off"))
    empty = torch.empty

    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("cannot pin")
        return empty(*args, **kwargs)  # type: ignore[call-overload,no-any-return]

    fake_device.clear_transfers()
    with monkeypatch.context() as patch:  # undone before the device ends, which puts back the real function
        if why == "nothing to pin":
            patch.setattr(torch, "empty", refuse)
        parking.park()
        parking.restore()
    assert [(t.bytes, t.pinned) for t in fake_device.transfers if t.bytes >= 100] == [(5000, False)] * 2


def test_host_memory_is_not_written_where_the_device_has_no_values() -> None:
    with activate(memory="1 GiB", data=False) as device:
        component = component_of(device, 5000)
        parking = Parking(component, "component", OffloadConfig(parking="always", immutable_weights=True))
        device.clear_transfers()
        parking.park()
        assert [(t.bytes, t.pinned) for t in device.transfers] == [(5000, False)]
        parking.restore()
        assert device.requested == 5000


@pytest.mark.parametrize("verb", ["park", "restore"])
def test_a_failure_in_the_middle_of_a_weight_changes_nothing(fake_device: FakeDevice, verb: str) -> None:
    component = component_of(fake_device, 5000)
    value = component.w0.cpu()
    parking = Parking(component, "component", OffloadConfig(parking="always", keep_host_copies=False))
    for k in range(1, 6):
        parking.restore() if verb == "park" else parking.park()
        before = fake_device.requested
        inject = fake_device.fail_host_copy if verb == "park" else fake_device.fail_device_copy
        inject(after=k)
        with pytest.raises((MemoryError, torch.OutOfMemoryError)):
            getattr(parking, verb)()
        assert fake_device.requested == before
    parking.restore()
    assert torch.equal(component.w0.cpu(), value)
