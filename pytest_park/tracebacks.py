"""Failures are shown where the test met the fake device, not by the lines of the fake device inside."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

import pytest

_ROOM: Final = "pytest_park.fakegpu"
# What torch raises for what a test has done, out of memory and races included, and what the host raises for want of
# memory. Any other kind is a fault of the fake device, whose lines are then wanted.
_OF_THE_TEST: Final = (RuntimeError, IndexError, MemoryError)


def end_at_the_test() -> None:
    """Have pytest leave the lines of the fake device out of such tracebacks; ``--full-trace`` still shows them."""
    if _ROOM not in sys.modules:  # no fake device was ever used
        return
    for module in vars(sys.modules[_ROOM]).values():
        if isinstance(module, ModuleType) and module.__name__.startswith(_ROOM):
            vars(module).setdefault("__tracebackhide__", _is_of_the_test)


def _is_of_the_test(excinfo: pytest.ExceptionInfo[BaseException] | None) -> bool:
    return excinfo is not None and excinfo.errisinstance(_OF_THE_TEST)
