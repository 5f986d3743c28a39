"""``python -m pytest_park.contract module:factory``: the verdict on a parkable as a table for a person.

The factory returns a `Parkable` over a new module at each call. If it takes an argument, it is given a fake accelerator
(``pytest_park.fakegpu``) on which everything is run; otherwise it brings its own device.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .examine import examine, select
from .table import diagnoses, table
from .verdict import Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the findings; the exit code is 1 if a promise is broken, 2 if the factory is no good."""
    parser = argparse.ArgumentParser(prog="python -m pytest_park.contract", description=__doc__)
    parser.add_argument("factory", help="where the factory is, as module:name")
    parser.add_argument("--only", action="append", default=[], help="a promise (c05) or a family (updates); repeatable")
    parser.add_argument("--memory", default="2 GiB", help="of the fake accelerator (default: %(default)s)")
    parser.add_argument("--brief", action="store_true", help="the table without the diagnoses")
    options = parser.parse_args(arguments)
    try:
        select(options.only)
        factory = _load(options.factory)
    except (ImportError, AttributeError, ValueError) as error:
        print(f"cannot run {options.factory!r}: {error}", file=sys.stderr)
        return 2
    verdicts = _run(factory, options.only, options.memory)
    print(table(verdicts))
    findings = [verdict.finding for verdict in verdicts if verdict.finding is not None]
    if findings and not options.brief:
        print(f"\n{diagnoses(findings)}\n")
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if findings else 0


def _load(place: str) -> Callable[..., Any]:
    module, colon, name = place.partition(":")
    if not colon or not name:
        raise ValueError("give it as module:factory")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise ValueError(f"{name} is not callable")
    return found  # type: ignore[no-any-return]


def _run(factory: Callable[..., Any], only: Sequence[str], memory: str) -> list[Verdict]:
    if not inspect.signature(factory).parameters:
        return examine(factory, only=only)
    # Imported here and nowhere else in this package: the checks themselves do not know the fake accelerator.
    from pytest_park.fakegpu import activate

    with activate(memory=memory) as gpu:
        return examine(lambda: factory(gpu), only=only)


if __name__ == "__main__":
    sys.exit(main())
