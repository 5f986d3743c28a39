"""The verdicts are those of docs/patients.md: a promise that is kept or broken since then is seen."""

from __future__ import annotations

import pytest

from .examination import verdicts_of
from .page import HEAD, column, section, without_evidence
from .roster import PATIENTS, ROOT, Patient

PAGE = (ROOT / "docs" / "patients.md").read_text()
HOW = "if that is right: tox -qq exec -e patients -- python -m patients > docs/patients.md"


def test_the_page_has_the_head_that_is_printed_and_a_section_for_each_patient() -> None:
    assert PAGE.startswith(HEAD)
    assert [line.removeprefix("## ") for line in PAGE.splitlines() if line.startswith("## ")] == list(PATIENTS)


@pytest.mark.parametrize("patient", PATIENTS.values(), ids=PATIENTS.keys())
def test_the_verdicts_are_those_of_the_page(patient: Patient) -> None:
    verdicts = verdicts_of(patient)
    assert _column(patient.name) == column(verdicts), HOW
    assert _section(patient.name) == without_evidence(section(patient, verdicts)), HOW


def _column(name: str) -> dict[int, str]:
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line[:1] == "|")
    return {int(row[0].removeprefix("C")): row[head.index(name)] for row in rows}


def _section(name: str) -> list[str]:
    text = PAGE[PAGE.index(f"## {name}\n") :]
    return without_evidence(text.partition("\n## ")[0].rstrip("\n") + "\n")
