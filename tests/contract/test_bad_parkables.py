"""A parkable that cannot be tested gets one clear answer, and not forty confusing ones, in each way to ask about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_park.contract import Parkable, check
from pytest_park.contract.__main__ import main
from pytest_park.fakegpu import FakeDevice

from . import bad

SUITE = """
import pytest
from pytest_park.contract import ParkableContract
from tests.contract import bad

class TestMine(ParkableContract):
    @pytest.fixture
    def parkable(self, fake_device):
        return bad.{factory}(fake_device)
"""
TWICE = """
import pytest
from pytest_park import fakegpu
from pytest_park.contract import ParkableContract
from tests.contract import bad

class TestMine(ParkableContract):
    @pytest.fixture(scope="class")
    @classmethod
    def parkable(cls):
        with fakegpu.activate(memory="1 GiB") as gpu:
            yield bad.healthy(gpu)
"""

each_bad_one = pytest.mark.parametrize(
    ("make", "says"), [pytest.param(make, says, id=make.__name__) for make, says in bad.SAYS.items()]
)


@each_bad_one
def test_the_function(make: Callable[[FakeDevice], Parkable], says: str, fake_device: FakeDevice) -> None:
    (finding,) = check(lambda: make(fake_device))
    assert finding.outcome == "untestable"
    assert says in finding.seen
    headline, expected, *_ = str(finding).splitlines()
    assert headline == "This parkable cannot be tested, so no promise is checked"
    assert expected.startswith("  expected: a parkable with weights on a device")


@each_bad_one
def test_the_command(
    make: Callable[[FakeDevice], Parkable],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(".")  # undone afterwards; the command adds the current folder, too
    assert main([f"{bad.__name__}:{make.__name__}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "UNTESTABLE"
    assert sum(says in line for line in lines) == 1
    assert lines[-1] == "1 untestable"


@each_bad_one
def test_the_class(make: Callable[[FakeDevice], Parkable], says: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE.format(factory=make.__name__))
    result = pytester.runpytest("-k", "c00 or c08", "-rs")
    result.assert_outcomes(failed=1, skipped=2)
    result.stdout.re_match_lines([rf"  seen: .*{re.escape(says)}", rf"SKIPPED .*cannot be tested: .*{re.escape(says)}"])


@pytest.mark.parametrize("make", [bad.parks_nothing, bad.restore_raises, bad.adopts_badly])
def test_the_class_in_a_process_without_its_first_test(
    make: Callable[[FakeDevice], Parkable], pytester: pytest.Pytester
) -> None:
    """With xdist, or with ``-k``: the test that finds it out says so instead of something that follows from it."""
    pytester.makepyfile(SUITE.format(factory=make.__name__))
    result = pytester.runpytest("-k", "c04 or c25", "-rs")
    result.assert_outcomes(failed=1, skipped=14)
    result.stdout.fnmatch_lines(["This parkable cannot be tested*", "SKIPPED*this parkable cannot be tested*"])
    result.stdout.fnmatch_lines(["  seen:     Parkable(adopt=...) was given two linear layers, and then: *"])


def test_a_module_that_is_not_built_anew(fake_device: FakeDevice, pytester: pytest.Pytester) -> None:
    one = bad.healthy(fake_device)
    findings = check(lambda: one)
    assert ["same module again" in finding.seen for finding in findings] == [True]


def test_a_fixture_that_builds_one_module_for_the_class(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TWICE)
    result = pytester.runpytest("-k", "c00 or c08", "-W", "ignore")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*the fixture parkable returned the same module again: build a new one each time*"])


def test_a_factory_that_raises_is_asked_once() -> None:
    def factory() -> Parkable:
        raise FileNotFoundError("no weights.safetensors")

    (finding,) = check(factory)
    assert finding.outcome == "untestable"
    assert finding.seen.startswith(
        "the factory raised FileNotFoundError: no weights.safetensors (test_bad_parkables.py:"
    )


def test_a_report_that_is_none(fake_device: FakeDevice) -> None:
    def make() -> Parkable:
        return replace(bad.healthy(fake_device), report=lambda result: {"freed": 3})  # type: ignore[arg-type, return-value]

    seen = {finding.seen for finding in check(make, only=["c08_the_reported", "c29_the_report_names_what"])}
    assert seen == {"a dict"}
