"""The verdicts for a person: a table with one line per check, and one diagnosis for each that found something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .verdict import Finding, Verdict, shortened

_SIGNS = {"kept": "kept", "broken": "BROKEN", "hangs": "HANGS", "untestable": "UNTESTABLE", "not applicable": "-"}


def table(verdicts: Iterable[Verdict]) -> str:
    """Lines of promise, outcome and title; a check with variants says how many of them are broken or do not apply."""
    by_check: dict[tuple[int, str], list[Verdict]] = {}
    for verdict in verdicts:
        by_check.setdefault((verdict.promise, verdict.check.partition("[")[0]), []).append(verdict)
    lines = []
    for (promise, _), group in by_check.items():
        name = f"C{promise}" if promise else ""
        lines.append(f"{name:>4}  {_outcome(group):<16}  {group[0].title}")
        reasons = dict.fromkeys(verdict.reason for verdict in group if verdict.outcome == "not applicable")
        if reasons and all(verdict.outcome == "not applicable" for verdict in group):
            lines.append(f"{'':24}{'; '.join(reasons)}")
    return "\n".join(lines)


def diagnoses(findings: Iterable[Finding]) -> str:
    """The first finding of each check in full, with one line under it for what was seen in its other cases."""
    by_check: dict[str, list[Finding]] = {}
    for finding in findings:
        by_check.setdefault(finding.check.partition("[")[0], []).append(finding)
    return "\n\n".join("\n".join([str(first), *_others(first, others)]) for first, *others in by_check.values())


def _others(first: Finding, others: Sequence[Finding]) -> Iterator[str]:
    cases: dict[str, list[str]] = {}
    for finding in others:
        cases.setdefault(finding.seen, []).append(finding.check.partition("[")[2].removesuffix("]"))
    for seen, names in cases.items():
        yield f"  also in: {shortened(tuple(names), '; ')}. Seen: {'the same' if seen == first.seen else seen}"


def _outcome(group: Sequence[Verdict]) -> str:
    outcomes = [verdict.outcome for verdict in group]
    if "untestable" in outcomes:
        return _SIGNS["untestable"]
    if "broken" in outcomes:
        return _SIGNS["broken"] + (f" {outcomes.count('broken')} of {len(group)}" if len(group) > 1 else "")
    if "hangs" in outcomes:
        return _SIGNS["hangs"]
    if "kept" in outcomes:
        return _SIGNS["kept"]
    return _SIGNS["not applicable"]
