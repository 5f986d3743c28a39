"""The marks: their help, what their arguments mean, and the fixtures that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from pytest_park.options import Leaks, count_of, leaks_named, memory_of, park_options
from pytest_park.sizes import parse_size

HELP: Final = (
    "real_gpu(*, vendor=None, count=1, memory=None): the test needs real GPUs and runs only under --real-gpu; vendor "
    "is nvidia, amd, intel or apple, memory a size such as '12 GiB' that the device must have at least.",
    "fake_device(*, memory=None, count=None, leaks=None, expandable_segments=None): the fake devices of the test have "
    "this memory and number, whatever the options say; memory that outlives the test is an 'error', or with 'allow' is "
    "none; the allocator uses expandable segments or not, else as PYTORCH_ALLOC_CONF says.",
    "headroom(size): when the body of the test starts, the headroom of park_device is this many bytes, or a size such "
    "as '64 MiB'.",
)

_FAKE_DEVICE: Final = ("memory", "count", "leaks", "expandable_segments")


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


def size(mark: str, nodeid: str, value: int | str) -> int:
    """``value`` in bytes; what is no size is a ``pytest.UsageError`` that names the test."""
    try:
        return parse_size(value)
    except ValueError as error:
        raise pytest.UsageError(f"{nodeid}: @pytest.mark.{mark}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeDeviceWish:
    """The fake devices that a test wants: memory of each in bytes, their number, what memory is that outlives it, and
    the kind of their segments (None: as the environment says)."""

    memory: int
    count: int
    leaks: Leaks
    expandable_segments: bool | None


def fake_device_wish(item: pytest.Item) -> FakeDeviceWish:
    """What the mark of a test says about its fake devices; what it does not say is as the options have it."""
    options = park_options(item.config)
    mark = item.get_closest_marker("fake_device")
    given = {} if mark is None else arguments(mark, item.nodeid, keyword=_FAKE_DEVICE)
    memory, count, leaks, expandable_segments = (given.get(name) for name in _FAKE_DEVICE)
    source = f"{item.nodeid}: @pytest.mark.fake_device"
    if expandable_segments is not None and not isinstance(expandable_segments, bool):
        raise pytest.UsageError(f"{source}: expandable_segments={expandable_segments!r} is neither True nor False.")
    return FakeDeviceWish(
        memory=options.fake_memory if memory is None else memory_of(memory, source),
        count=options.fake_count if count is None else count_of(count, source),
        leaks=options.fake_leaks if leaks is None else leaks_named(leaks, source),
        expandable_segments=expandable_segments,
    )


def headroom_wish(item: pytest.Item) -> int | str | None:
    """The headroom that the mark of a test asks for, as it is written there; None where there is no mark."""
    mark = item.get_closest_marker("headroom")
    if mark is None:
        return None
    wish: int | str = arguments(mark, item.nodeid, positional=("size",))["size"]
    size("headroom", item.nodeid, wish)
    return wish


def request_fixtures(items: Iterable[pytest.Item]) -> None:
    """Give each test with a mark the fixture of that name, as ``usefixtures`` would."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is None:  # not a Python function
            continue
        wanted = [name for name in ("fake_device", "headroom") if item.get_closest_marker(name) and name not in names]
        if wanted:
            # A new list, because those of one function with other parameters, and maybe without the mark, share theirs.
            item.fixturenames = [*names, *wanted]  # type: ignore[attr-defined]


def check(item: pytest.Item) -> None:
    """A mark of *item* that makes no sense is a ``pytest.UsageError``, whether the test uses it or not."""
    if item.get_closest_marker("fake_device") is not None:
        fake_device_wish(item)
    headroom_wish(item)


def apply_headroom(item: pytest.Item) -> None:
    """Make the headroom that the mark of ``item`` promises, if it has one."""
    wish = headroom_wish(item)
    if wish is not None and "headroom" in getattr(item, "funcargs", {}):
        item.funcargs["headroom"](wish)  # type: ignore[attr-defined]
