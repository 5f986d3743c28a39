"""The fake devices that are active in this process, by index: the one piece of global state, because torch has one too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device import FakeDevice

cards: list[FakeDevice] = []
_current: list[int] = [0]


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
    raise RuntimeError(f"fakegpu error: invalid device ordinal {index}; there are {len(cards)} (see activate(count=...))")


def current() -> int:
    """The index that ``"fakegpu"`` without an index means."""
    return _current[0]


def make_current(index: int) -> None:
    card(index)
    _current[0] = index


def is_available() -> bool:
    return bool(cards)
