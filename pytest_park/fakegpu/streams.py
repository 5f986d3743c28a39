"""Streams and events. Everything runs at once, in program order; what waits for what is told to the sanitizer."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import torch

from . import active
from .by_device import ByDevice, named_device
from .sanitizer import stream_key

_stream_ids = itertools.count(1)
_event_ids = itertools.count(1)
_FAKE_TYPE = 20  # c10::DeviceType::PrivateUse1
_STREAMS_PER_POOL = 32  # 1 << kStreamsPerPoolBits


class Stream(torch._C.Stream):
    """A queue of work on one fake device, with the methods of ``torch.cuda.Stream``. Id 0 is the default stream.

    There are 32 of each priority, and whoever asks for one more shares the first (``c10/cuda/CUDAStream.cpp``).
    """

    def __new__(cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> Stream:
        index = active.index_of(named_device(device))
        card = active.card(index)
        made = super().__new__(
            cls,
            stream_id=_from_pool(card.streams.setdefault(priority, deque())) if stream_id is None else stream_id,
            device_index=index,
            device_type=_FAKE_TYPE,
        )
        made.priority = priority
        if stream_id is None:
            card.sanitizer.stream_made(made.stream_id)
        return made

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        pass

    priority: int

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        """All work given to this stream from now on runs after what *event* recorded."""
        active.card(self.device_index).sanitizer.waited(event.id, self._key())

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """All work given to this stream from now on runs after the work that *stream* has now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """True: whoever asks finds the work done, and may rely on it from then on."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait, on the host, for the work that this stream has."""
        active.card(self.device_index).stream_synchronized(self.stream_id)

    def _key(self) -> int:
        return stream_key(self.device_index, self.stream_id)

    def __enter__(self) -> Stream:
        active.entered_streams().append((self.device_index, active.stream(self.device_index), active.index()))
        active.make_current(self.device_index)
        active.make_stream_current(self.device_index, self.stream_id)
        return self

    def __exit__(self, *exception: object) -> None:
        index, stream_id, device = active.entered_streams().pop()
        active.make_stream_current(index, stream_id)
        active.make_current(device)

    def __repr__(self) -> str:
        return f"<fakegpu.Stream device={self.device} id={self.stream_id}>"


def _from_pool(pool: deque[int]) -> int:
    if len(pool) < _STREAMS_PER_POOL:
        pool.append(next(_stream_ids))
    else:
        pool.rotate(-1)
    return pool[-1]


class Event(torch._C.Event):
    """A point in the work of a stream, with the methods of ``torch.cuda.Event``."""

    def __new__(
        cls, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        made = super().__new__(cls, device=torch.device("fakegpu", active.index()), enable_timing=enable_timing)
        made.id = next(_event_ids)
        made.timed = enable_timing
        made.recorded_at = None
        made.stream = None
        return made

    def __init__(self, device: Any = None, **options: Any) -> None:
        pass

    id: int
    timed: bool
    recorded_at: float | None
    moment: int
    stream: Stream | None

    def record(self, stream: Stream | None = None) -> None:  # type: ignore[override]
        self.stream = current_stream() if stream is None else stream
        self.recorded_at = time.perf_counter()
        self.moment = active.card(self.stream.device_index).allocator.tick()
        active.card(self.stream.device_index).sanitizer.recorded(self.id, self.stream._key())

    def wait(self, stream: Stream | None = None) -> None:  # type: ignore[override]
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """True, see `Stream.query`."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait, on the host, for what was recorded."""
        if self.stream is not None:
            card = active.card(self.stream.device_index)
            card.allocator.stream_reached(self.stream.stream_id, self.moment)
            card.sanitizer.host_waited_for_event(self.id)
            card.deliver()

    def elapsed_time(self, end: Event) -> float:  # type: ignore[override]
        """Milliseconds between the two records, in the host's time."""
        if not self.timed or not end.timed:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.recorded_at is None or end.recorded_at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end.recorded_at - self.recorded_at) * 1e3


def current_stream(device: Any = None) -> Stream:
    index = active.index_of(named_device(device))
    return Stream(torch.device("fakegpu", index), stream_id=active.stream(index))


def default_stream(device: Any = None) -> Stream:
    return Stream(torch.device("fakegpu", active.index_of(named_device(device))), stream_id=0)


def set_stream(stream: torch.Stream) -> None:
    active.make_stream_current(stream.device_index, stream.stream_id)


class AnyStream(metaclass=ByDevice, native=torch._C.Stream, fake=Stream, unnamed=Stream):
    """``torch.Stream`` while a fake device is active."""


class AnyEvent(metaclass=ByDevice, native=torch._C.Event, fake=Event, unnamed=Event):
    """``torch.Event`` while a fake device is active."""
