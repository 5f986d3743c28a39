"""docs/contract.md says what the checks say."""

from __future__ import annotations

from pathlib import Path

from pytest_park.contract.page import page
from pytest_park.contract.registry import all_checks

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"


def test_the_page_is_the_one_that_the_checks_make() -> None:
    assert PAGE.read_text() == page(), "run: python -m pytest_park.contract.page > docs/contract.md"


def test_every_check_is_on_it_with_its_reports() -> None:
    text = PAGE.read_text()
    for check in all_checks():
        if check.promise:
            assert f"`{check.id}`" in text
            assert [report for report in check.reports if f"https://github.com/{report})" not in text] == []


def test_every_promise_has_a_section() -> None:
    sections = [line for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert sections == [f"## C{number}" for number in range(1, 41)]
