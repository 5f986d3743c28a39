"""The matrix as a page of documentation: ``python -m tests.contract.page > docs/matrix.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable

from pytest_park.contract.registry import all_checks

from .matrix import FAMILIES, ids
from .sick.bank import BANK, Sick

_PAGE = """\
# The matrix of the contract

A check that cannot fail is worth nothing. So each check of [the contract](contract.md) was seen red on a small
implementation of parking that has just the fault that the check is there for, in `tests/contract/sick/`. All of them
are made from one healthy implementation, which keeps every promise.

{count}: each turns red the checks that it is meant for and
those that follow from its fault, and no other.
`pytest -n 2 tests/contract/test_matrix.py` runs every check on every one of them, and `python -m tests.contract` prints
what it finds, with the number of cases. This page is made from the declarations that those tests hold to the truth:
`python -m tests.contract.page > docs/matrix.md`.
"""


def page() -> str:
    """Markdown: the count, and for each family of the sick a table of faults and red checks."""
    sections = [_PAGE.format(count=count())]
    for family in FAMILIES:
        rows = [_row(sick) for sick in BANK.values() if sick.implementation.__module__ == family.__name__]
        head = ["| implementation | fault | red | red because of that |", "|---|---|---|---|"]
        sections.append("\n".join([f"## {family.__name__.rpartition('.')[2].capitalize()}\n", *head, *rows]) + "\n")
    return "\n".join(sections)


def count() -> str:
    """The sentence that other pages quote."""
    checks = [check for check in all_checks() if check.promise]
    cases = sum(max(len(check.variants), 1) for check in checks)
    return f"{len(checks)} checks in {cases} cases, and {len(BANK)} sick implementations"


def _row(sick: Sick) -> str:
    fault = " ".join(inspect.getdoc(sick.implementation).split())  # type: ignore[union-attr]  # a test sees to that
    return f"| `{sick.name}` | {fault} | {_names(sick.meant)} | {_names(sick.follows)} |"


def _names(prefixes: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(ids(prefixes)))


if __name__ == "__main__":
    sys.stdout.write(page())
