"""``python -m tests.contract``: every sick implementation, and the checks that it turns red with how many variants."""

from __future__ import annotations

from pytest_park.contract.registry import all_checks
from pytest_park.fakegpu import activate

from .matrix import FAMILIES, red_checks
from .sick.bank import BANK
from .sick.healthy import Healthy


def main() -> None:
    variants = {check.id: max(len(check.variants), 1) for check in all_checks()}
    implementations: list[type[Healthy]] = [Healthy, *(sick.implementation for sick in BANK.values())]
    for implementation in implementations:
        with activate(memory="256 MiB", count=2) as device:
            red = red_checks(implementation, device)
        print(f"{implementation.__name__} ({implementation.__module__.rpartition('.')[2]})")
        for check, found in red.items():
            print(f"    {check}{'' if variants[check] == 1 else f' ({len(found)} of {variants[check]})'}")
    print(
        f"{len(BANK)} sick implementations in {len(FAMILIES)} families, {len(variants)} checks, "
        f"{sum(variants.values())} with all variants"
    )


if __name__ == "__main__":
    main()
