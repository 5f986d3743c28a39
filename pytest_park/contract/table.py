"""The verdicts as a table: one line per check, with its variants counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .verdict import Verdict

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
