"""The verdicts as a page of documentation: a table of promises and patients, and what was seen of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pytest_park.contract import Verdict

from .roster import PATIENTS, Patient

HEAD = """\
# Other projects under the contract

The [contract](contract.md) on released code of other projects: what they do, not how good they are. A promise that a
project has not made is not its fault, and what is listed here may have been mended since.

Seen in November 2026 on the fake device, with torch 2.13.0 on Python 3.11. **No GPU took part.** The wheels are the
released ones, installed without their dependencies; nothing of theirs is in this repository. `tox -e patients` installs
them and tells whether this page still holds; then `tox -qq exec -e patients -- python -m patients` prints it anew.

*kept*: in all cases of all checks of a promise that apply. *broken*: in all of them; *3 of 19*: in so many. *–*: does
not apply, mostly because the project has no such thing. How often two threads tear the state (C38) differs from run to
run, so there *broken* means in one case or more. A promise that is broken only because another one is counts all
the same: a second park that brings everything back is also seen by a check that parks again after a failure.
"""


def page(found: Mapping[str, list[Verdict]]) -> str:
    """Markdown, from the verdicts by the names of the patients."""
    columns = {name: column(verdicts) for name, verdicts in found.items()}
    promises = sorted({promise for cells in columns.values() for promise in cells})
    rows = [["", *columns], ["---"] * (len(columns) + 1)]
    rows += [[f"C{promise}", *(cells.get(promise, "–") for cells in columns.values())] for promise in promises]
    table = [f"| {' | '.join(row)} |" for row in rows]
    sections = [section(PATIENTS[name], verdicts) for name, verdicts in found.items()]
    return "\n".join([HEAD, *table, "", "\n".join(sections)])


def column(verdicts: Iterable[Verdict]) -> dict[int, str]:
    """The cells of one patient, by the number of the promise."""
    outcomes: dict[int, list[str]] = {}
    for verdict in verdicts:
        if verdict.promise or verdict.outcome == "untestable":
            outcomes.setdefault(verdict.promise, []).append(verdict.outcome)
    return {promise: _cell(promise, found) for promise, found in outcomes.items()}


#: The promise about threads: which of its cases break is a matter of chance.
BY_CHANCE = 38


def _cell(promise: int, outcomes: list[str]) -> str:
    judged = [outcome for outcome in outcomes if outcome != "not applicable"]
    broken = sum(outcome != "kept" for outcome in judged)
    if not judged:
        return "–"
    if not broken:
        return "kept"
    return "**broken**" if broken == len(judged) or promise == BY_CHANCE else f"**{broken} of {len(judged)}**"


def section(patient: Patient, verdicts: Iterable[Verdict]) -> str:
    """What the patient is, and a line for each check that found something."""
    checks: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        checks.setdefault(verdict.check.partition("[")[0], []).append(verdict)
    lines = [
        _line(group) for group in checks.values() if any(v.outcome not in ("kept", "not applicable") for v in group)
    ]
    unjudged = [f"\nNot judged: `{check}`, because {reason}." for check, reason in patient.unjudged.items()]
    return "\n".join([f"## {patient.name}", "", patient.about, "", "Broken:", "", *lines, *unjudged, ""])


def _line(group: list[Verdict]) -> str:
    """The promise and the cases, then what was seen in the first of them."""
    broken = [verdict for verdict in group if verdict.outcome not in ("kept", "not applicable")]
    judged = sum(verdict.outcome != "not applicable" for verdict in group)
    counted = len(group) > 1 and group[0].promise != BY_CHANCE
    cases = f", {len(broken)} of {judged} cases" if counted else ""
    case = broken[0].check.partition("[")[2].rstrip("]")
    return (
        f"- C{group[0].promise}{cases}, {group[0].title}.{SEEN}{f'({case}) ' if case else ''}{_brief(broken[0].reason)}"
    )


#: What stands before the evidence in a line. The evidence has line numbers and addresses; the verdict is before it.
SEEN = " Seen: "


def _brief(reason: str) -> str:
    """Without the memory report of an error, and not longer than a person reads."""
    text = re.sub(r"\. GPU \d+ has .*", "", " ".join(reason.split()))
    return text if len(text) <= 240 else f"{text[:240].rpartition(' ')[0]} ..."


def without_evidence(text: str) -> list[str]:
    """The lines of a page or section without what was seen, for comparison."""
    return [line.partition(SEEN)[0] for line in text.splitlines()]
