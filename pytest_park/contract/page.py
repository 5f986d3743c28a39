"""The promises as a page of documentation: ``python -m pytest_park.contract.page > docs/contract.md``."""

from __future__ import annotations

import sys

from .registry import Check, all_checks
from .verdict import REPORTS

_HEAD = """\
# The contract of a parkable module

What every implementation of parking must keep, in words that fit any of them. Each check is a test of
`pytest_park.contract.ParkableContract` under the name that is given here: `pytest -k c05` picks it, `-k updates` its
family. The links lead to public reports of people who met the fault. [The matrix](matrix.md) has for each check an
implementation with the fault, which turns it red. This page is generated from the checks:
`python -m pytest_park.contract.page > docs/contract.md`.

How long it takes: on a component of 20 modules and 2 million parameters, all of it is 23 seconds of processor time in
one process, and 33 in two. `time pytest -n 2 tests/contract/test_two_million_parameters.py` measures it.
"""


def page() -> str:
    """Markdown: a section per promise, with two sentences and the reports for each of its checks."""
    promises: dict[int, list[Check]] = {}
    for check in all_checks():
        if check.promise:
            promises.setdefault(check.promise, []).append(check)
    sections = [_HEAD]
    for number, checks in promises.items():
        sections.append(f"## C{number}\n\n" + "\n\n".join(map(_entry, checks)) + "\n")
    return "\n".join(sections)


def _entry(check: Check) -> str:
    cases = f", {len(check.variants)} cases" if len(check.variants) > 1 else ""
    links = ", ".join(f"[{_short(report)}]({REPORTS}{report})" for report in check.reports)
    return (
        f"{_sentence(check.title)} {_sentence(f'It is broken where {check.cause}')}\n"
        f"Met in {links}. (`{check.id}`, {check.family}{cases})"
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def _short(report: str) -> str:
    owner, repository, _, number = report.split("/")
    return f"{owner}/{repository}#{number}"


if __name__ == "__main__":
    sys.stdout.write(page())
