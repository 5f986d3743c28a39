"""docs/contract.md says what the checks say, and docs/matrix.md what the sick implementations say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_park.contract.page import page
from pytest_park.contract.registry import all_checks

from . import page as matrix

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contract.md"
MATRIX = ROOT / "docs" / "matrix.md"


def test_the_page_is_the_one_that_the_checks_make() -> None:
    assert PAGE.read_text() == page(), "run: python -m pytest_park.contract.page > docs/contract.md"


def test_the_matrix_is_the_one_that_the_bank_makes() -> None:
    assert MATRIX.read_text() == matrix.page(), "run: python -m tests.contract.page > docs/matrix.md"


@pytest.mark.parametrize("file", [ROOT / "README.md", MATRIX], ids=lambda file: file.name)
def test_the_count_is_right_wherever_it_is_told(file: Path) -> None:
    text = " ".join(file.read_text().split())
    told = re.findall(r"\d+ checks in \d+ cases, and \d+ sick implementations", text)
    assert told == [matrix.count()] * len(told)
    assert told or file != MATRIX


def test_every_check_is_on_it_with_its_reports() -> None:
    text = PAGE.read_text()
    for check in all_checks():
        if check.promise:
            assert f"`{check.id}`" in text
            assert [report for report in check.reports if f"https://github.com/{report})" not in text] == []


def test_every_promise_has_a_section() -> None:
    sections = [line for line in PAGE.read_text().splitlines() if line.startswith("## ")]
    assert sections == [f"## C{number}" for number in range(1, 41)]
