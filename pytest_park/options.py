"""What the user asked for: command line over ini file over defaults, in one dataclass.

Every option is None unless it is given, so that the ini value is seen; a value that makes no sense is a usage error
(exit code 4) that says which values do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeGuard, get_args

import pytest

from pytest_park.sizes import GiB, format_bytes, parse_size

DEFAULT_FAKE_MEMORY: Final = 12 * GiB
DEFAULT_FAKE_COUNT: Final = 1
# What one DLPack device index and every table of the fake device can hold with ease; a larger number is a typing error.
MAX_FAKE_COUNT: Final = 16

#: What memory of a fake device that outlives its test is: an error of the test, or allowed.
Leaks = Literal["error", "allow"]
DEFAULT_FAKE_LEAKS: Final[Leaks] = "error"

_STASH_KEY: Final = pytest.StashKey["ParkOptions"]()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkOptions:
    """The plugin's settings for one run.

    ``fake_memory`` is the capacity of each fake device in bytes, ``fake_count`` how many there are, ``fake_leaks`` what
    memory is that outlives its test. ``stated`` says
    whether any of the plugin's settings was given: a run that does not mention us is not told about us either.
    """

    real_gpu: bool
    fake_memory: int
    fake_count: int
    fake_leaks: Leaks
    stated: bool


def add_options(parser: pytest.Parser) -> None:
    """Declare the ``--park-*`` options and the ``park_*`` ini values."""
    group = parser.getgroup("park", "parking of weights, on a fake accelerator or a real GPU")
    group.addoption(
        "--real-gpu",
        action="store_true",
        default=None,
        dest="park_real_gpu",
        help="Run tests marked real_gpu, and give park_device the real accelerator instead of the fake one. "
        "It is an error if there is none.",
    )
    group.addoption(
        "--park-fake-memory",
        metavar="SIZE",
        default=None,
        help="Memory of the fake device, such as '8 GiB' (ini: park_fake_memory; default: "
        f"{format_bytes(DEFAULT_FAKE_MEMORY)}).",
    )
    group.addoption(
        "--park-fake-count",
        metavar="N",
        default=None,
        help=f"Number of fake devices (ini: park_fake_count; default: {DEFAULT_FAKE_COUNT}).",
    )
    group.addoption(
        "--park-fake-leaks",
        metavar="|".join(get_args(Leaks)),
        default=None,
        help="What memory of a fake device is that outlives its test (ini: park_fake_leaks; default: "
        f"{DEFAULT_FAKE_LEAKS}).",
    )
    parser.addini("park_fake_memory", "Memory of the fake device, such as '8 GiB'.", default=None)
    parser.addini("park_fake_count", "Number of fake devices.", default=None)
    parser.addini("park_fake_leaks", "Memory that outlives its test: error or allow.", default=None)


def load_options(config: pytest.Config) -> ParkOptions:
    """Read the options, check them, and remember them for :func:`park_options`. Raises ``pytest.UsageError``."""
    memory, memory_source = _given(config, "park_fake_memory")
    count, count_source = _given(config, "park_fake_count")
    leaks, leaks_source = _given(config, "park_fake_leaks")
    real_gpu = bool(config.getoption("park_real_gpu"))
    options = ParkOptions(
        real_gpu=real_gpu,
        fake_memory=DEFAULT_FAKE_MEMORY if memory is None else memory_of(memory, memory_source),
        fake_count=DEFAULT_FAKE_COUNT if count is None else count_of(_number_or_text(count), count_source),
        fake_leaks=DEFAULT_FAKE_LEAKS if leaks is None else leaks_named(leaks, leaks_source),
        stated=real_gpu or memory is not None or count is not None,
    )
    config.stash[_STASH_KEY] = options
    return options


def park_options(config: pytest.Config) -> ParkOptions:
    """The options of this run."""
    return config.stash[_STASH_KEY]


def memory_of(value: int | str, source: str) -> int:
    """``value`` in bytes if a fake device can have it, else a ``pytest.UsageError`` that names ``source``."""
    try:
        memory = parse_size(value)
    except ValueError as error:
        raise pytest.UsageError(f"{source}: {error}") from None
    if memory == 0:
        raise pytest.UsageError(f"{source}: a device without memory is of no use, give at least {format_bytes(1)}.")
    return memory


def is_count(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a number of devices that a person can have meant."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def count_of(value: object, source: str) -> int:
    """``value`` if it is a number of fake devices, else a ``pytest.UsageError`` that names ``source``."""
    if not is_count(value) or value > MAX_FAKE_COUNT:
        raise pytest.UsageError(
            f"{source}: {value!r} is not a number of devices: give a number from 1 to {MAX_FAKE_COUNT}."
        )
    return value


def leaks_named(value: object, source: str) -> Leaks:
    """``value`` if it is one of :data:`Leaks`, else a ``pytest.UsageError`` that names ``source``."""
    for known in get_args(Leaks):
        if value == known:
            named: Leaks = known
            return named
    valid = " or ".join(repr(known) for known in get_args(Leaks))
    raise pytest.UsageError(f"{source}: {value!r} does not say what leaks are: use {valid}.")


def _given(config: pytest.Config, name: str) -> tuple[str | None, str]:
    """The text given for a setting, if any, and how the user calls the place where it was given."""
    option = config.getoption(name)
    if option is not None:
        return str(option), "--" + name.replace("_", "-")
    ini: str | None = config.getini(name)
    return ini, f"{name} in the ini file"


def _number_or_text(text: str) -> int | str:
    return int(text) if text.strip().isdecimal() else text
