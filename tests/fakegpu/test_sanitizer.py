"""Accesses on several streams that nothing orders raise `RaceError`; those that something orders do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_park.fakegpu import FakeDevice, RaceError


def current() -> torch.Stream:
    return torch.fakegpu.current_stream()


@pytest.fixture
def side(fake_device: FakeDevice) -> torch.Stream:
    """A stream that has waited for nothing."""
    return torch.fakegpu.Stream()


@pytest.fixture
def ones(side: torch.Stream) -> Tensor:
    """Written on the default stream, after the side stream was made."""
    return torch.ones(1024, device="fakegpu")


# -- reads after writes -----------------------------------------------------------------------------------------------


def test_a_read_that_does_not_wait_for_the_write_is_a_race(side: torch.Stream, ones: Tensor) -> None:
    with side, pytest.raises(RaceError, match="wait_stream, wait_event, record_stream or synchronize"):
        ones * 2


def test_a_read_that_waits_for_the_write_is_none(side: torch.Stream, ones: Tensor) -> None:
    side.wait_stream(current())
    with side:
        twice = ones * 2
    current().wait_stream(side)
    assert torch.equal((twice + 1).cpu(), torch.full((1024,), 3.0))


def test_a_wait_on_another_stream_does_not_help(side: torch.Stream, ones: Tensor) -> None:
    other = torch.fakegpu.Stream()
    other.wait_stream(current())
    with side, pytest.raises(RaceError):
        ones * 2


def test_an_order_by_way_of_a_third_stream_is_an_order(side: torch.Stream, ones: Tensor) -> None:
    between = torch.fakegpu.Stream()
    between.wait_stream(current())
    side.wait_stream(between)
    with side:
        twice = ones * 2
    torch.fakegpu.synchronize()
    assert twice.tolist() == [2] * 1024


def test_an_event_recorded_before_the_write_does_not_help(side: torch.Stream) -> None:
    early = current().record_event()
    ones = torch.ones(4, device="fakegpu")
    side.wait_event(early)
    with side, pytest.raises(RaceError):
        ones * 2


def test_work_from_before_the_first_stream_counts(fake_device: FakeDevice) -> None:
    ones = torch.ones(4, device="fakegpu")
    with torch.fakegpu.Stream(), pytest.raises(RaceError, match="before the first stream was made"):
        ones * 2


def test_work_from_before_the_first_stream_that_the_host_waited_for_does_not(fake_device: FakeDevice) -> None:
    ones = torch.ones(4, device="fakegpu")
    torch.fakegpu.synchronize()
    with torch.fakegpu.Stream():
        twice = ones * 2
    torch.fakegpu.synchronize()
    assert twice.tolist() == [2] * 4


def test_weights_that_were_copied_blocking_can_be_read_on_any_stream(fake_device: FakeDevice) -> None:
    weight = torch.ones(4).to("fakegpu")
    with torch.fakegpu.Stream() as side:
        twice = weight * 2
    side.synchronize()
    assert twice.tolist() == [2] * 4


def test_what_the_host_waited_for_is_ordered_also_by_way_of_another_stream(side: torch.Stream, ones: Tensor) -> None:
    between = torch.fakegpu.Stream()
    between.wait_stream(current())
    between.synchronize()
    with side:
        twice = ones * 2
    side.synchronize()
    assert twice.tolist() == [2] * 1024


# -- writes -----------------------------------------------------------------------------------------------------------


def test_a_write_over_what_another_stream_reads_is_a_race(side: torch.Stream, ones: Tensor) -> None:
    side.wait_stream(current())
    with side:
        ones + 1
    with pytest.raises(RaceError):
        ones.add_(1)


def test_two_reads_at_once_are_none(side: torch.Stream, ones: Tensor) -> None:
    side.wait_stream(current())
    with side:
        on_the_side = ones + 1
    assert (ones + 2).tolist() == [3] * 1024
    side.synchronize()
    assert on_the_side.tolist() == [2] * 1024


def test_writes_to_different_slices_are_none(side: torch.Stream, ones: Tensor) -> None:
    side.wait_stream(current())
    with side:
        ones[:512].fill_(2)
    ones[512:].fill_(3)
    torch.fakegpu.synchronize()
    assert ones.tolist() == [2] * 512 + [3] * 512


def test_a_slice_and_the_whole_share_bytes(side: torch.Stream, ones: Tensor) -> None:
    side.wait_stream(current())
    with side:
        ones[512:].fill_(2)
    with pytest.raises(RaceError):
        ones.sum()


# -- freed memory -----------------------------------------------------------------------------------------------------


def test_memory_reused_while_another_stream_reads_it_is_a_race(side: torch.Stream) -> None:
    with pytest.raises(RaceError, match="record_stream"):
        _reuse_what_another_stream_reads(side, record=False)


def test_with_record_stream_the_memory_is_not_reused(side: torch.Stream) -> None:
    assert _reuse_what_another_stream_reads(side, record=True) == [1] * 4096


def _reuse_what_another_stream_reads(side: torch.Stream, *, record: bool) -> list[float]:
    ones = torch.ones(4096, device="fakegpu")
    side.wait_stream(current())
    with side:
        ones * 2
    if record:
        ones.record_stream(side)
    del ones
    return torch.ones(4096, device="fakegpu").tolist()


def test_memory_that_a_stream_was_given_may_still_be_used_by_the_one_that_freed_it(side: torch.Stream) -> None:
    ones = torch.ones(4096, device="fakegpu")
    del ones
    reused = torch.empty(4096, device="fakegpu")  # the default stream may write it at once, but not another one
    with side, pytest.raises(RaceError, match="aten.fill_"):
        reused.fill_(2)
    side.wait_stream(current())
    with side:
        reused.fill_(3)
    side.synchronize()
    assert reused.tolist() == [3] * 4096


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_prefetch_that_is_waited_for_is_right(side: torch.Stream) -> None:
    host = torch.arange(64.0, pin_memory=True)
    with side:
        weight = host.to("fakegpu", non_blocking=True)
        arrived = side.record_event()
    current().wait_event(arrived)
    assert torch.equal((weight + 1).cpu(), torch.arange(64.0) + 1)


def test_a_prefetch_that_is_not_waited_for_is_a_race(side: torch.Stream) -> None:
    host = torch.ones(64, pin_memory=True)
    with side:
        weight = host.to("fakegpu", non_blocking=True)
    with pytest.raises(RaceError, match="copy_"):
        weight + 1


def test_a_copy_to_the_host_is_there_once_the_host_has_waited_for_it(fake_device: FakeDevice) -> None:
    host = torch.ones(4, device="fakegpu").to("cpu", non_blocking=True)
    assert host.isnan().all()
    torch.fakegpu.synchronize()
    assert host.tolist() == [1] * 4


def test_waiting_for_another_stream_does_not_bring_it(side: torch.Stream, ones: Tensor) -> None:
    side.wait_stream(current())
    with side:
        host = ones.to("cpu", non_blocking=True)
        arrived = side.record_event()
    current().synchronize()
    assert host.isnan().all()
    arrived.synchronize()
    assert host.tolist() == [1] * 1024


def to_device(host: Tensor, device: Tensor) -> Tensor:
    return device.copy_(host, non_blocking=True)


def to_host(host: Tensor, device: Tensor) -> Tensor:
    return host.copy_(device, non_blocking=True)


@pytest.mark.parametrize("copy", [to_device, to_host])
def test_a_pageable_buffer_cannot_be_used_asynchronously(
    fake_device: FakeDevice, copy: Callable[[Tensor, Tensor], Tensor]
) -> None:
    host, device = torch.zeros(4), torch.ones(4).to("fakegpu")
    fake_device.clear_transfers()
    with torch.fakegpu.Stream(), pytest.raises(RaceError, match="a pageable buffer used asynchronously"):
        copy(host, device)
    assert fake_device.transfers == []
    assert len(fake_device.races) == 1
    assert host.tolist() == [0] * 4
    assert device.tolist() == [1] * 4


@pytest.mark.parametrize("copy", [to_device, to_host])
def test_on_the_default_stream_it_is_only_slow(
    fake_device: FakeDevice, copy: Callable[[Tensor, Tensor], Tensor]
) -> None:
    copied = copy(torch.full((4,), 2.0), torch.full((4,), 2.0).to("fakegpu"))
    assert copied.tolist() == [2] * 4
    assert fake_device.races == ()


def test_what_runs_unwatched_is_not_reported(side: torch.Stream, ones: Tensor, fake_device: FakeDevice) -> None:
    with fake_device.unwatched():
        with side:
            twice = ones * 2
        torch.fakegpu.Stream()
        with fake_device.unwatched():
            pass
        with side:
            ones * 2
    with side, pytest.raises(RaceError):
        ones * 2
    assert twice.tolist() == [2] * 1024


@pytest.mark.parametrize("where", ["before", "inside"])
def test_after_an_unwatched_stretch_it_watches_whenever_the_first_stream_was_made(
    fake_device: FakeDevice, where: str
) -> None:
    with fake_device.unwatched():
        side = torch.fakegpu.Stream() if where == "inside" else None
    side = side or torch.fakegpu.Stream()
    ones = torch.ones(4, device="fakegpu")
    with side, pytest.raises(RaceError):
        ones * 2


# -- the report -------------------------------------------------------------------------------------------------------


def test_the_report_shows_both_accesses_with_their_stacks(side: torch.Stream, fake_device: FakeDevice) -> None:
    written = torch.zeros(16, device="fakegpu").fill_(7)
    with side, pytest.raises(RaceError) as caught:
        written.mul(2)
    report = str(caught.value)
    assert "aten.fill_" in report
    assert "aten.mul" in report
    assert report.count("test_the_report_shows_both_accesses_with_their_stacks") >= 2
    assert "fakegpu:0" in report
    assert fake_device.races == (caught.value,)


@pytest.mark.fake_device(count=2)
def test_default_streams_of_two_devices_are_two_streams(fake_device: FakeDevice) -> None:
    first, second = torch.fakegpu.Stream(device=0), torch.fakegpu.Stream(device=1)
    ones = torch.ones(4, device="fakegpu:1")
    second.wait_stream(torch.fakegpu.current_stream(0))  # the wrong one
    with second, pytest.raises(RaceError):
        ones * 2
    second.wait_stream(torch.fakegpu.current_stream(1))
    with second:
        twice = ones * 2
    second.synchronize()
    assert twice.tolist() == [2] * 4
    assert first != second


@pytest.mark.fake_device(count=2)
def test_a_copy_between_devices_is_ordered_with_the_current_streams_of_both(fake_device: FakeDevice) -> None:
    side = torch.fakegpu.Stream(device=0)
    ones = torch.ones(4, device="fakegpu:0")
    there = ones.to("fakegpu:1", non_blocking=True)
    assert (there + 1).tolist() == [2] * 4  # the stream of the target has waited
    ones.add_(1)
    with side, pytest.raises(RaceError, match="copy_|add_"):
        ones.to("fakegpu:1", non_blocking=True)
    assert there.tolist() == [1] * 4


def test_an_operator_with_a_list_as_a_default_is_watched_too(fake_device: FakeDevice) -> None:
    side = torch.fakegpu.Stream()
    waves = torch.ones(1, 1, 8, device="fakegpu")
    assert torch.nn.functional.avg_pool1d(waves, kernel_size=2, stride=2).sum() == 4
    waves.add_(1)
    with pytest.raises(RaceError), torch.fakegpu.stream(side):
        torch.nn.functional.avg_pool1d(waves, kernel_size=2, stride=2)
