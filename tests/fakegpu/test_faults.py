"""Faults on demand: the k-th allocation or copy fails, once, with the error that was asked for, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_park.fakegpu import FakeDevice


class Special(Exception):
    pass


def allocate() -> torch.Tensor:
    return torch.empty(10, device="fakegpu")


def to_the_device() -> torch.Tensor:
    return torch.ones(10).to("fakegpu")


def to_the_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu()


@pytest.fixture
def on_device(fake_device: FakeDevice) -> torch.Tensor:
    return torch.ones(10, device=fake_device.device)


@pytest.fixture(params=["allocation", "device copy", "host copy"])
def kind(request: pytest.FixtureRequest, fake_device: FakeDevice, on_device: torch.Tensor) -> tuple[Any, Any, Any]:
    """(how to ask for the fault, what then fails, with what)"""
    return {
        "allocation": (fake_device.fail_allocation, allocate, torch.OutOfMemoryError),
        "device copy": (fake_device.fail_device_copy, to_the_device, torch.OutOfMemoryError),
        "host copy": (fake_device.fail_host_copy, lambda: to_the_host(on_device), MemoryError),
    }[request.param]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_kth_fails_and_only_the_kth(kind: tuple[Any, Any, Any], k: int) -> None:
    fail, act, error = kind
    fail(after=k)
    for _ in range(k - 1):
        act()
    with pytest.raises(error, match=f"k = {k}"):
        act()
    for _ in range(3):
        act()


@pytest.mark.parametrize(
    "error", [Special("mine"), KeyboardInterrupt(), MemoryError("mine"), RuntimeError("mine")], ids=repr
)
def test_any_exception_can_be_had_and_arrives_unchanged(kind: tuple[Any, Any, Any], error: BaseException) -> None:
    fail, act, _ = kind
    fail(after=1, error=error)
    with pytest.raises(type(error)) as caught:
        act()
    assert caught.value is error


@pytest.mark.parametrize("after", [0, -1, 1.5, "2", None, True])
def test_counts_that_make_no_sense_are_refused(kind: tuple[Any, Any, Any], after: Any) -> None:
    fail, act, _ = kind
    with pytest.raises(ValueError, match="counted from 1"):
        fail(after=after)
    act()


def test_a_failed_event_changes_nothing(fake_device: FakeDevice, on_device: torch.Tensor) -> None:
    copy = torch.zeros(10, device=fake_device.device)
    host = torch.zeros(10)
    before = (fake_device.allocated, fake_device.requested, fake_device.reserved)
    for fail, act in (
        (fake_device.fail_allocation, lambda: on_device + on_device),
        (fake_device.fail_device_copy, lambda: copy.copy_(torch.ones(10))),
        (fake_device.fail_host_copy, lambda: host.copy_(on_device)),
    ):
        fail(after=1, error=Special())
        with pytest.raises(Special):
            act()
        assert (fake_device.allocated, fake_device.requested, fake_device.reserved) == before
    assert copy.tolist() == host.tolist() == [0] * 10


def test_kinds_are_counted_apart(fake_device: FakeDevice, on_device: torch.Tensor) -> None:
    fake_device.fail_host_copy(after=1)
    fake_device.fail_device_copy(after=2)
    fake_device.fail_allocation(after=4)
    to_the_device()  # an allocation and a device copy
    with pytest.raises(MemoryError):
        to_the_host(on_device)
    allocate()
    with pytest.raises(torch.OutOfMemoryError, match="copy failed"):
        to_the_device()  # the third allocation, the second copy
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        allocate()


@pytest.mark.parametrize("error", ["out of memory", "", MemoryError, 0])
def test_what_cannot_be_raised_is_refused(kind: tuple[Any, Any, Any], error: Any) -> None:
    fail, act, _ = kind
    with pytest.raises(TypeError, match="can fail with an exception, made before; got error="):
        fail(error=error)
    act()


def test_a_later_request_replaces_an_earlier_one(kind: tuple[Any, Any, Any]) -> None:
    fail, act, _ = kind
    fail(after=1)
    fail(after=2, error=Special())
    act()
    with pytest.raises(Special):
        act()
    act()


def test_faults_that_did_not_happen_can_be_forgotten(fake_device: FakeDevice, kind: tuple[Any, Any, Any]) -> None:
    fail, act, _ = kind
    fail(after=1)
    fake_device.clear_faults()
    act()


@pytest.mark.fake_device(count=2)
def test_the_devices_fail_apart(fake_device: FakeDevice) -> None:
    fake_device.devices[1].fail_allocation()
    torch.ones(1, device="fakegpu:0")
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1, device="fakegpu:1")


def test_views_and_in_place_operators_are_no_allocations(fake_device: FakeDevice, on_device: torch.Tensor) -> None:
    fake_device.fail_allocation()
    on_device.view(2, 5).t()[1:].add_(1)
    with pytest.raises(torch.OutOfMemoryError):
        on_device.clone()


def test_copies_within_the_device_are_neither_host_nor_device_copies(
    fake_device: FakeDevice, on_device: torch.Tensor
) -> None:
    fake_device.fail_device_copy()
    fake_device.fail_host_copy()
    on_device.clone().copy_(on_device)
    on_device.sum()
    with pytest.raises(MemoryError):
        on_device.cpu()
    with pytest.raises(torch.OutOfMemoryError):
        on_device.copy_(torch.zeros(10))


@pytest.mark.parametrize("k", range(1, 5))
def test_a_module_that_fails_to_move_can_be_moved_again(fake_device: FakeDevice, k: int) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    expected = module(torch.ones(1, 3)).tolist()
    fake_device.fail_device_copy(after=k)
    with pytest.raises(torch.OutOfMemoryError):
        module.to(fake_device.device)
    assert [parameter.device.type for parameter in module.parameters()].count("fakegpu") == k - 1
    module.to(fake_device.device)
    output = module(torch.ones(1, 3, device=fake_device.device))
    torch.testing.assert_close(output.cpu(), torch.tensor(expected))


def test_an_interrupt_inside_an_operator_arrives(fake_device: FakeDevice, on_device: torch.Tensor) -> None:
    weight = torch.ones(10, 10, device=fake_device.device, requires_grad=True)
    fake_device.fail_allocation(after=1, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        nn.functional.linear(on_device, weight)
    loss = nn.functional.linear(on_device, weight).sum()
    fake_device.fail_allocation(after=1, error=Special("in backward"))
    with pytest.raises(Special, match="in backward"):
        loss.backward()


def test_a_recording_of_memory_sees_every_change(fake_device: FakeDevice) -> None:
    fake_device.record_memory()
    first = torch.ones(1000, device=fake_device.device)
    fake_device.mark("two")
    second = torch.ones(1000, device=fake_device.device)
    del first
    fake_device.mark("one")
    fake_device.record_memory(False)
    torch.ones(1, device=fake_device.device)
    assert [label for _, label in fake_device.marks] == ["two", "one"]
    levels = [sample.allocated for sample in fake_device.memory_log]
    assert levels[0] == 0
    assert max(levels) == 8192
    assert levels[-1] == 4096
    assert [sample.seconds for sample in fake_device.memory_log] == sorted(s.seconds for s in fake_device.memory_log)
    assert second.numel() == 1000
