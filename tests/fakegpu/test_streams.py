"""Streams and events have the methods of CUDA's, belong to threads, and decide when memory may be reused."""

from __future__ import annotations

import threading

import pytest
import torch

from pytest_park.fakegpu import FakeDevice, RaceError
from pytest_park.sizes import MiB


def test_the_default_stream_is_current(fake_device: FakeDevice) -> None:
    assert torch.fakegpu.current_stream() == torch.fakegpu.default_stream()
    assert torch.fakegpu.current_stream().stream_id == 0
    assert torch.fakegpu.current_stream().device == fake_device.device


def test_a_stream_is_current_within_its_context(fake_device: FakeDevice) -> None:
    outer, inner = torch.fakegpu.Stream(), torch.fakegpu.Stream()
    assert outer != inner
    assert len({outer, inner, torch.fakegpu.default_stream()}) == 3
    with torch.fakegpu.stream(outer):
        assert torch.fakegpu.current_stream() == outer
        with torch.fakegpu.stream(inner):
            assert torch.fakegpu.current_stream() == inner
        with torch.fakegpu.stream(None):
            assert torch.fakegpu.current_stream() == outer
        assert torch.fakegpu.current_stream() == outer
    assert torch.fakegpu.current_stream() == torch.fakegpu.default_stream()


def test_a_stream_is_given_back_after_an_exception(fake_device: FakeDevice) -> None:
    with pytest.raises(ValueError, match="inside"), torch.fakegpu.stream(torch.fakegpu.Stream()):
        raise ValueError("inside")
    assert torch.fakegpu.current_stream() == torch.fakegpu.default_stream()


def test_one_stream_may_be_entered_twice(fake_device: FakeDevice) -> None:
    stream = torch.fakegpu.Stream()
    with stream, stream:
        assert torch.fakegpu.current_stream() == stream
    assert torch.fakegpu.current_stream().stream_id == 0


@pytest.mark.fake_device(count=2)
def test_a_stream_brings_its_device(fake_device: FakeDevice) -> None:
    stream = torch.fakegpu.Stream(device=1)
    assert stream.device == torch.device("fakegpu:1")
    with torch.fakegpu.stream(stream):
        assert torch.fakegpu.current_device() == 1
        assert torch.fakegpu.current_stream() == torch.fakegpu.current_stream(1) == stream
        assert torch.fakegpu.current_stream(0).stream_id == 0
    assert torch.fakegpu.current_device() == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.fakegpu.Stream(device=2)


def test_the_current_stream_belongs_to_the_thread(fake_device: FakeDevice) -> None:
    seen: list[int] = []
    with torch.fakegpu.stream(torch.fakegpu.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.fakegpu.current_stream().stream_id))
        thread.start()
        thread.join()
    assert seen == [0]


def test_torchs_own_classes_make_them(fake_device: FakeDevice) -> None:
    stream, event = torch.Stream(device="fakegpu"), torch.Event(device="fakegpu")
    assert isinstance(stream, torch.Stream)
    assert isinstance(event, torch.Event)
    assert isinstance(torch.fakegpu.Stream(), torch.Stream)
    assert not isinstance(event, torch.Stream)
    assert issubclass(torch.fakegpu.Stream, torch.Stream)
    assert stream.device == fake_device.device
    with stream:
        assert torch.accelerator.current_stream() == stream


def test_without_a_device_they_are_of_the_current_accelerator(fake_device: FakeDevice) -> None:
    weight = torch.ones(3, device=fake_device.device)
    for stream in (torch.Stream(), torch.Stream(0), torch.Stream(priority=-1)):
        assert stream.device == fake_device.device
        assert stream != torch.accelerator.current_stream()
        with pytest.raises(RaceError), stream:
            weight.mul_(2)
    start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0
    assert torch.Generator().device.type == "cpu"


def test_everything_of_a_stream_and_an_event_can_be_called(fake_device: FakeDevice) -> None:
    stream, event = torch.fakegpu.Stream(priority=-1), torch.fakegpu.Event()
    assert stream.record_event(event) is event
    stream.wait_event(event)
    stream.wait_stream(torch.fakegpu.current_stream())
    event.record()
    event.record(stream)
    event.wait(stream)
    event.wait()
    event.synchronize()
    stream.synchronize()
    torch.fakegpu.synchronize()
    assert event.query()
    assert stream.query()
    assert stream.priority == -1
    assert "fakegpu" in repr(stream)


def test_events_measure_time(fake_device: FakeDevice) -> None:
    start, middle, end = (torch.fakegpu.Event(enable_timing=True) for _ in range(3))
    for event in (start, middle, end):
        event.record()
    assert 0 <= start.elapsed_time(middle) <= start.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.fakegpu.Event().elapsed_time(end)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(torch.fakegpu.Event(enable_timing=True))


def test_copies_are_logged_with_their_stream(fake_device: FakeDevice) -> None:
    stream = torch.fakegpu.Stream()
    with torch.fakegpu.stream(stream):
        torch.ones(3).to(fake_device.device)
    torch.ones(3).to(fake_device.device)
    assert [transfer.stream for transfer in fake_device.transfers] == [stream.stream_id, 0]


# -- memory -----------------------------------------------------------------------------------------------------------


def a_large_tensor() -> torch.Tensor:
    return torch.empty(20 * MiB, dtype=torch.uint8, device="fakegpu")


def test_memory_of_a_side_stream_is_reused_by_that_stream_only(fake_device: FakeDevice) -> None:
    side = torch.fakegpu.Stream()
    with torch.fakegpu.stream(side):
        a_large_tensor()
        a_large_tensor()
    assert fake_device.reserved == 20 * MiB
    a_large_tensor()
    assert fake_device.reserved == 40 * MiB


def test_without_record_stream_memory_is_reusable_at_once_and_the_reuse_is_a_race(fake_device: FakeDevice) -> None:
    tensor, side = a_large_tensor(), torch.fakegpu.Stream()
    side.wait_stream(torch.fakegpu.current_stream())
    with torch.fakegpu.stream(side):
        tensor.add_(1)
    del tensor
    again = a_large_tensor()
    assert fake_device.reserved == 20 * MiB
    with pytest.raises(RaceError, match="record_stream"):
        again.fill_(0)


@pytest.mark.parametrize("how", ["stream", "event", "device", "torch.accelerator"])
def test_after_record_stream_memory_is_reusable_once_that_stream_is_done(fake_device: FakeDevice, how: str) -> None:
    tensor, side = a_large_tensor(), torch.fakegpu.Stream()
    tensor.record_stream(side)
    del tensor
    assert fake_device.allocated == 0
    a_large_tensor()
    assert fake_device.reserved == 40 * MiB
    {
        "stream": side.synchronize,
        "event": side.record_event().synchronize,
        "device": torch.fakegpu.synchronize,
        "torch.accelerator": torch.accelerator.synchronize,
    }[how]()
    both = a_large_tensor(), a_large_tensor()
    assert fake_device.reserved == 40 * MiB
    assert len(both) == 2


def test_record_stream_of_the_own_stream_changes_nothing(fake_device: FakeDevice) -> None:
    tensor = a_large_tensor()
    tensor.record_stream(torch.fakegpu.current_stream())
    del tensor
    a_large_tensor()
    assert fake_device.reserved == 20 * MiB


def test_record_stream_through_a_view_counts_for_the_storage(fake_device: FakeDevice) -> None:
    tensor = a_large_tensor()
    tensor[5:9].record_stream(torch.fakegpu.Stream())
    del tensor
    a_large_tensor()
    assert fake_device.reserved == 40 * MiB


def test_an_event_recorded_before_the_use_does_not_release_it(fake_device: FakeDevice) -> None:
    tensor, side = a_large_tensor(), torch.fakegpu.Stream()
    early = side.record_event()
    tensor.record_stream(side)
    del tensor
    fake_device.allocator.settle()
    early.synchronize()
    a_large_tensor()
    assert fake_device.reserved == 40 * MiB


@pytest.mark.fake_device(count=2)
def test_there_are_32_streams_of_each_priority_on_each_device(fake_device: FakeDevice) -> None:
    first = [torch.fakegpu.Stream() for _ in range(32)]
    assert [torch.fakegpu.Stream() for _ in range(32)] == first
    others = {torch.fakegpu.Stream(priority=-1).stream_id, torch.fakegpu.Stream(device=1).stream_id}
    assert len({stream.stream_id for stream in first} | others) == 34
