"""The fake devices that are active, by index, and what is current in each thread: global state, as torch has it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .device import FakeDevice
    from .sanitizer import Sanitizer

cards: list[FakeDevice] = []
#: True where the devices have no data; for kernels, which look here once.
without_data = False
#: The sanitizer, once it has begun; for kernels, which look here once.
sanitizer: Sanitizer | None = None


class _Current(threading.local):
    """As on CUDA, the current device and the current stream of each device belong to the thread."""

    index = 0

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        self.entered: list[tuple[int, int, int]] = []


_current = _Current()


def card(index: int) -> FakeDevice:
    """The active fake device with this index; raises ``RuntimeError`` as CUDA does for an ordinal it does not have."""
    try:
        if index >= 0:
            return cards[index]
    except IndexError:
        pass
    if not cards:
        raise RuntimeError(
            "no fakegpu is active: a tensor or a call refers to device type 'fakegpu' outside of"
            " pytest_park.fakegpu.activate() and of the fake_device fixture"
        )
    raise RuntimeError(
        f"fakegpu error: invalid device ordinal {index}; there are {len(cards)} (see activate(count=...))"
    )


def index() -> int:
    """The index of the current device."""
    return _current.index


def index_of(device: torch.device | None) -> int:
    """The index that *device* names; the current one if it names none."""
    return _current.index if device is None or device.index is None else device.index


def make_current(index: int) -> None:
    card(index)
    _current.index = index


def stream(index: int) -> int:
    """The id of the current stream of device *index*; 0 is the default stream."""
    return _current.streams.get(index, 0)


def make_stream_current(index: int, stream_id: int) -> None:
    _current.streams[index] = stream_id


def entered_streams() -> list[tuple[int, int, int]]:
    """The ``with stream:`` blocks of this thread: (device, its stream before, current device before)."""
    return _current.entered


def forget() -> None:
    """The end of all fake devices, in all threads."""
    global without_data, sanitizer, _current
    without_data, sanitizer = False, None
    cards.clear()
    _current = _Current()


def has_data() -> bool:
    """Whether the active devices hold values; without any, the question does not come up."""
    return not cards or cards[0].data


def where_kernels_run() -> str:
    """The device type whose kernels are borrowed: the CPU's, or those of tensors without data."""
    return "cpu" if has_data() else "meta"


def is_available() -> bool:
    return bool(cards)
