"""What the libraries warn of, and the last lines of a run: how many classes, and what the contract said of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ..warnings_of_others import allow

#: Warnings of the libraries themselves, by how they begin.
THE_LIBRARIES_OWN = ("`Transformer2DModelOutput` is deprecated", "In fakegpu autocast, but the target dtype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow(THE_LIBRARIES_OWN, items, below=Path(__file__).parent)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    verdicts: list[dict[str, int]] = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for key, value in report.user_properties
        if key == "verdicts"
    ]
    if not verdicts:
        return
    outcomes: Counter[str] = sum(map(Counter, verdicts), Counter())
    kept = outcomes.pop("kept", 0)
    not_applicable = sum(count for outcome, count in outcomes.items() if outcome.startswith("not applicable"))
    terminalreporter.section("the contract on real classes")
    terminalreporter.write_line(
        f"{len(verdicts)} classes of diffusers and transformers under park_core: {kept} checks kept, "
        f"{sum(outcomes.values()) - not_applicable} broken, {not_applicable} not applicable:"
    )
    for outcome, count in sorted(outcomes.items()):
        terminalreporter.write_line(f"  {count} {outcome}")
