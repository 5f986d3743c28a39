"""`ParkableContract` in somebody's test suite: what is selected, skipped, expected to fail, and what it says."""

from __future__ import annotations

import pytest

HEAD = """
import pytest
from pytest_park.contract import Parkable, ParkableContract
from tests.contract.sick.healthy import Healthy, parkable as made
from tests.contract.sick.idempotence import DropsTheOnlyCopy
from tests.contract.sick.patient import component
from tests.contract.sick.sharing import ParksNothing
"""


def suite(pytester: pytest.Pytester, implementation: str, *lines: str) -> None:
    body = "\n    ".join(lines)
    pytester.makepyfile(f"""{HEAD}
class TestMine(ParkableContract):
    {body}

    @pytest.fixture
    def parkable(self, fake_device):
        return made({implementation}, *component(fake_device.device))
""")


def test_a_promise_that_is_known_to_be_broken_is_expected_to_fail(pytester: pytest.Pytester) -> None:
    suite(pytester, "DropsTheOnlyCopy", "known_broken = {'c05_': 'the second park forgets, see issue 12'}")
    result = pytester.runpytest("-k", "c05", "-rx")
    result.assert_outcomes(passed=6, xfailed=6)
    result.stdout.fnmatch_lines(["XFAIL *known to be broken: the second park forgets, see issue 12*"])
    assert result.ret == 0


def test_a_promise_that_is_broken_unknown_to_them_fails(pytester: pytest.Pytester) -> None:
    suite(pytester, "DropsTheOnlyCopy", "known_broken = {'c36_': 'nothing is shared'}")
    result = pytester.runpytest("-k", "c05")
    result.assert_outcomes(passed=6, failed=6)
    result.stdout.fnmatch_lines(["C5 is broken: parking again keeps the memory free*", "*met by others: https://*"])


def test_a_promise_that_is_kept_after_all_asks_for_its_line(pytester: pytest.Pytester) -> None:
    suite(pytester, "Healthy", "known_broken = {'c24_': 'a staging buffer'}")
    result = pytester.runpytest("-k", "c24")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["this promise is kept: take c24_* out of known_broken (a staging buffer)"])


def test_one_variant_can_be_known_to_be_broken(pytester: pytest.Pytester) -> None:
    suite(
        pytester,
        "DropsTheOnlyCopy",
        "known_broken = {'c10_the_second_end_of_use_restores_nothing[huge headroom]': 'later'}",
    )
    result = pytester.runpytest("-k", "c10")
    result.assert_outcomes(passed=1, failed=2, xfailed=1)


def test_a_line_about_no_check_is_an_error(pytester: pytest.Pytester) -> None:
    suite(pytester, "Healthy", "known_broken = {'c05_': 'why', 'c41_': 'there is none'}")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E *TestMine.known_broken: the name of no check begins with 'c41_'"])


def test_a_family_is_picked_by_its_name(pytester: pytest.Pytester) -> None:
    suite(pytester, "Healthy", "pass")
    result = pytester.runpytest("-k", "idempotence", "--collect-only", "-q")
    ids = [line for line in result.outlines if "::" in line]
    assert {line.split("test_")[-1][:3] for line in ids} == {"c05", "c06", "c07", "c08", "c09", "c10"}


def test_the_others_are_skipped_where_nothing_can_be_tested(pytester: pytest.Pytester) -> None:
    suite(pytester, "ParksNothing", "pass")
    result = pytester.runpytest("-k", "c00 or c08_the_counted", "-rs")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*This parkable cannot be tested*", "SKIPPED*this parkable cannot be tested*"])


def test_a_class_without_the_fixture_is_told_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"{HEAD}\nclass TestMine(ParkableContract):\n    pass\n")
    result = pytester.runpytest("-k", "c00")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  seen: * TestMine needs a fixture `parkable` that returns a Parkable"])
