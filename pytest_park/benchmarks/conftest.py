"""The ratios that the benchmarks note in ``extra_info``, as a table at the end of the run: times depend on the machine,
ratios of one run hardly do."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import pytest

_RATIOS: Final = pytest.StashKey[list[tuple[str, str, float]]]()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: list[dict[str, Any]]) -> Generator[None, Any, Any]:
    """pytest-benchmark hands out what it is about to print."""
    config.stash[_RATIOS] = [
        (benchmark["name"], what, value)
        for benchmark in benchmarks
        for what, value in benchmark["extra_info"].items()
        if what.startswith(("times", "share"))
    ]
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if ratios := config.stash.get(_RATIOS, []):
        terminalreporter.section("ratios")
        width = max(len(name) for name, _, _ in ratios)
        for name, what, value in ratios:
            terminalreporter.line(f"{name:{width}}  {value:6.2f} {what}")
