"""What a test leaves on its fake devices: looked for when the test has passed and all of its fixtures are gone."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from pytest_park.sizes import format_bytes

if TYPE_CHECKING:
    from pytest_park.fakegpu import FakeDevice

#: How many storages a report names, largest first.
_NAMED: Final = 10
#: Seconds for which a thread may go on holding, in ever longer pauses: autograd's lets go of the last node, or of an
#: exception that a backward ended in, a little after ``backward()`` itself.
_PAUSES: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)


@dataclass(slots=True)
class _Watch:
    devices: Sequence[FakeDevice]
    passed: bool | None = None  # not known before the body has run


_WATCH: Final = pytest.StashKey[_Watch]()


def watch(item: pytest.Item, device: FakeDevice) -> None:
    """The fake devices of *item* are just made, and empty: what is on them after the test is a leak."""
    item.stash[_WATCH] = _Watch(device.devices)


def note_result(item: pytest.Item, report: pytest.TestReport) -> None:
    """The traceback of a test that did not pass keeps its variables, so that only one that passed is looked at.

    Subtests report before their test, which itself passes here even where one of them failed.
    """
    if report.when == "call" and _WATCH in item.stash:
        watched = item.stash[_WATCH]
        watched.passed = report.passed and watched.passed is not False


def check(item: pytest.Item) -> None:
    """At the very end of the teardown of *item*: fail it if memory of its fake devices is still in use.

    Costs nothing where there is none. What only a reference cycle holds is not a leak, nor is what only pytest holds.
    """
    watched = item.stash.get(_WATCH, None)
    if watched is None:
        return
    del item.stash[_WATCH]
    if not watched.passed or not _live(watched.devices):
        return
    _let_go_of_what_pytest_holds(item)
    for generation in range(3):  # most is young and needs no walk over all objects
        if not _live(watched.devices):
            return
        gc.collect(generation)
    for pause in _PAUSES:
        if not _live(watched.devices):
            return
        time.sleep(pause)
        gc.collect()  # what a thread has let go of may be a cycle, as the frames of an exception are
    if left := _live(watched.devices):
        pytest.fail(_report(left), pytrace=False)


def _live(devices: Sequence[FakeDevice]) -> list[FakeDevice]:
    return [device for device in devices if device.requested]


def _let_go_of_what_pytest_holds(item: pytest.Item) -> None:
    """The values of the test's fixtures, which pytest itself drops in a moment; and what it has until its own end: the
    attributes of the test's instance, and the frames through which an exception among its parameters was raised."""
    import unittest  # here, because most runs of pytest do without it

    if isinstance(item, pytest.Function):
        item.funcargs.clear()
        if item.cls is not None and not issubclass(item.cls, unittest.TestCase):
            vars(item.instance).clear()
        for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
            if isinstance(value, BaseException):
                value.__traceback__ = None


def _report(devices: Sequence[FakeDevice]) -> str:
    lines = []
    for device in devices:
        holders = device.holders()
        lines.append(
            f"{format_bytes(device.requested)} of {device.device} ({device.requested} bytes; 0 before the test) outlive"
            " the test and its fixtures:"
        )
        lines += [f"  {holder}" for holder in holders[:_NAMED]]
        if len(holders) > _NAMED:
            lines.append(f"  and {len(holders) - _NAMED} more storages")
    return "\n".join(
        [
            *lines,
            "The device ended with the test, so this memory cannot be used any more; on a real one the next test would"
            ' lack it. Let go of it at the end of the test or, where it is meant to stay, say so: leaks="allow" in the'
            " mark fake_device, --park-fake-leaks=allow, or park_fake_leaks = allow in the ini file.",
        ]
    )
