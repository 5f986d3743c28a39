"""``python -m tests.contract``: every sick implementation, the checks that it turns red, and in how many cases each.

At the end come the cases that none of them turns red, if there are any; then the exit code is 1.
"""

from __future__ import annotations

import sys

from pytest_park.contract.registry import all_checks
from pytest_park.fakegpu import activate

from .matrix import FAMILIES, red_checks
from .page import count
from .sick.bank import BANK
from .sick.healthy import Healthy


def main() -> int:
    cases = {check.id: list(check.variants) or [""] for check in all_checks()}
    never_red = {(check, case) for check, names in cases.items() for case in names}
    implementations: list[type[Healthy]] = [Healthy, *(sick.implementation for sick in BANK.values())]
    for implementation in implementations:
        with activate(memory="256 MiB", count=2) as device:
            red = red_checks(implementation, device)
        print(f"{implementation.__name__} ({implementation.__module__.rpartition('.')[2]})")
        for check, found in red.items():
            print(f"    {check}{'' if cases[check] == [''] else f' ({len(found)} of {len(cases[check])})'}", flush=True)
            never_red -= {(check, case) for case in found}
    print(f"{count()} in {len(FAMILIES)} families")
    print(f"{len(never_red)} cases that no sick one turns red")
    for check, case in sorted(never_red):
        print(f"    {check}[{case}]")
    return 1 if never_red else 0


if __name__ == "__main__":
    sys.exit(main())
