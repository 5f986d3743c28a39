"""The matrix of sick implementations and the checks that they turn red."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pytest_park.contract import Parkable
from pytest_park.contract.examine import judge
from pytest_park.contract.host import set_aside, swift_collector
from pytest_park.contract.registry import all_checks
from pytest_park.fakegpu import FakeDevice

from .sick import accounting, decision, failures, idempotence, identity, readers, sharing, structure, updates, values
from .sick.bank import BANK
from .sick.healthy import Healthy, parkable
from .sick.patient import component

#: The modules that fill the bank when they are imported.
FAMILIES = (accounting, decision, failures, idempotence, identity, readers, sharing, structure, updates, values)


def red_checks(implementation: type[Healthy], device: FakeDevice, *, all_variants: bool = True) -> dict[str, list[str]]:
    """The ids of the checks that find something, with the variants in which they do.

    Without *all_variants* the first variant that is red speaks for its check. Where nothing crashes, no check gets a
    process of its own: that costs more than all the rest.
    """
    sick = BANK.get(implementation.__name__)
    may_crash = sick is not None and sick.crashes

    def make() -> Parkable:
        set_aside()
        return replace(parkable(implementation, *component(device.device)), fake_device=device)

    red: dict[str, list[str]] = {}
    with swift_collector():
        for check in all_checks():
            if check.in_child == "if possible" and not may_crash:
                check = replace(check, in_child="no")
            for variant in check.variants or (None,):
                verdict = judge(check, variant, make, repeats=check.promise > 0)
                assert verdict.outcome != "hangs", str(verdict.finding)
                if verdict.finding is not None:
                    red.setdefault(check.id, []).append(variant or "")
                    if verdict.outcome == "untestable":
                        return red
                    if not all_variants:
                        break
    return red


def ids(prefixes: Iterable[str]) -> set[str]:
    """The checks whose ids begin so; an abbreviation must mean one check."""
    found = set()
    for prefix in prefixes:
        (one,) = {check.id for check in all_checks() if check.id.startswith(prefix)}
        found.add(one)
    return found
