"""Every check was seen red on an implementation that has just its fault, and the healthy one is green everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_park.contract import Parkable, examine
from pytest_park.contract.registry import all_checks
from pytest_park.fakegpu import FakeDevice

from .sick import accounting, decision, failures, idempotence, identity, readers, sharing, structure, updates, values
from .sick.bank import BANK, Sick
from .sick.healthy import Healthy, parkable
from .sick.patient import component

FAMILIES = (accounting, decision, failures, idempotence, identity, readers, sharing, structure, updates, values)

pytestmark = pytest.mark.fake_device(count=2, memory="256 MiB")


def red_checks(implementation: type[Healthy], device: FakeDevice) -> dict[str, list[str]]:
    """The ids of the checks that find something, with the variants in which they do."""

    def make() -> Parkable:
        module, inputs = component(device.device)
        return replace(parkable(implementation, module, inputs), fake_device=device)

    red: dict[str, list[str]] = {}
    for verdict in examine(make):
        if verdict.finding is not None:
            check, _, variant = verdict.check.partition("[")
            red.setdefault(check, []).append(variant.rstrip("]"))
    return red


def ids(prefixes: frozenset[str]) -> set[str]:
    """The checks whose ids begin so; an abbreviation must mean one check."""
    found = set()
    for prefix in prefixes:
        (one,) = {check.id for check in all_checks() if check.id.startswith(prefix) or prefix in check.id}
        found.add(one)
    return found


def test_the_healthy_implementation_keeps_every_promise(fake_device: FakeDevice) -> None:
    assert red_checks(Healthy, fake_device) == {}


@pytest.mark.parametrize("sick", BANK.values(), ids=lambda sick: sick.name)
def test_a_sick_implementation_turns_exactly_its_checks_red(sick: Sick, fake_device: FakeDevice) -> None:
    red = red_checks(sick.implementation, fake_device)
    assert set(red) == ids(sick.meant) | ids(sick.follows)


def test_every_check_has_a_sick_implementation() -> None:
    covered = {check for sick in BANK.values() for check in ids(sick.meant)}
    assert {check.id for check in all_checks()} - covered == set()
