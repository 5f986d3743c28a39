"""The marks: their help, what their arguments mean, and the fixtures that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import pytest

from pytest_park.sizes import parse_size

HELP: Final = (
    "real_gpu(*, vendor=None, count=1, memory=None): the test needs real GPUs and runs only under --real-gpu; vendor "
    "is nvidia, amd, intel or apple, memory a size such as '12 GiB' that the device must have at least.",
    "fake_device(*, memory=None, count=None): the fake devices of the test have this memory and number, whatever the "
    "options say.",
    "headroom(size): when the body of the test starts, the headroom of park_device is this many bytes, or a size such "
    "as '64 MiB'.",
)


def arguments(
    mark: pytest.Mark, nodeid: str, *, positional: Sequence[str] = (), keyword: Sequence[str] = ()
) -> dict[str, Any]:
    """The arguments of ``mark`` by name. Wrong ones are a ``pytest.UsageError`` with the test and the valid form."""
    given: dict[str, Any] = {**dict(zip(positional, mark.args, strict=False)), **mark.kwargs}
    wrong = [*map(repr, mark.args[len(positional) :]), *sorted(set(mark.kwargs) - {*positional, *keyword})]
    if wrong or any(name not in given for name in positional):
        form = ", ".join([*positional, *(f"{name}=" for name in keyword)])
        what = f"not with {', '.join(wrong)}" if wrong else f"and needs {', '.join(positional)}"
        raise pytest.UsageError(f"{nodeid}: the mark is written @pytest.mark.{mark.name}({form}), {what}.")
    return given


def size(mark: pytest.Mark, nodeid: str, value: int | str) -> int:
    """``value`` in bytes; what is no size is a ``pytest.UsageError`` that names the test."""
    try:
        return parse_size(value)
    except ValueError as error:
        raise pytest.UsageError(f"{nodeid}: @pytest.mark.{mark.name}: {error}") from None


def number(mark: pytest.Mark, nodeid: str, value: Any) -> int:
    """``value`` if it is a number of devices, else a ``pytest.UsageError`` that names the test."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise pytest.UsageError(
            f"{nodeid}: @pytest.mark.{mark.name}: count={value!r} is not a number of devices: use 1 or more."
        )
    return value


def fake_device_wish(item: pytest.Item, *, memory: int, count: int) -> tuple[int, int]:
    """Memory in bytes and number of the fake devices of a test: its mark's, else those given here."""
    mark = item.get_closest_marker("fake_device")
    if mark is None:
        return memory, count
    given = arguments(mark, item.nodeid, keyword=("memory", "count"))
    if given.get("memory") is not None:
        memory = size(mark, item.nodeid, given["memory"])
    if given.get("count") is not None:
        count = number(mark, item.nodeid, given["count"])
    return memory, count


def request_fixtures(items: Iterable[pytest.Item]) -> None:
    """Give each test with a mark the fixture of that name, as ``usefixtures`` would; check the marks on the way."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is None:  # not a Python function: a doctest, say
            continue
        fake_device_wish(item, memory=1, count=1)
        if (mark := item.get_closest_marker("headroom")) is not None:
            size(mark, item.nodeid, arguments(mark, item.nodeid, positional=("size",))["size"])
        for name in ("fake_device", "headroom"):
            if item.get_closest_marker(name) is not None and name not in names:
                names.append(name)


def apply_headroom(item: pytest.Item) -> None:
    """Make the headroom that the mark of ``item`` promises, if it has one."""
    mark = item.get_closest_marker("headroom")
    if mark is not None and "headroom" in getattr(item, "funcargs", {}):
        item.funcargs["headroom"](mark.args[0] if mark.args else mark.kwargs["size"])  # type: ignore[attr-defined]
