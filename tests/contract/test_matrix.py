"""Every check was seen red on an implementation that has just its fault, and the healthy one is green everywhere.

Each sick implementation meets every check, in every variant until one is red.
"""

from __future__ import annotations

import pytest

from pytest_park.contract.registry import all_checks
from pytest_park.fakegpu import FakeDevice

from .matrix import FAMILIES, ids, red_checks
from .sick.bank import BANK, Sick
from .sick.healthy import Healthy

pytestmark = pytest.mark.fake_device(count=2, memory="256 MiB")


def test_the_healthy_implementation_keeps_every_promise(fake_device: FakeDevice) -> None:
    assert red_checks(Healthy, fake_device) == {}


@pytest.mark.parametrize("sick", BANK.values(), ids=lambda sick: sick.name)
def test_a_sick_implementation_turns_exactly_its_checks_red(sick: Sick, fake_device: FakeDevice) -> None:
    expected = ids(sick.meant) | ids(sick.follows)
    assert set(red_checks(sick.implementation, fake_device, all_variants=False)) == expected


def test_every_check_has_a_sick_implementation() -> None:
    covered = {check for sick in BANK.values() for check in ids(sick.meant)}
    assert {check.id for check in all_checks()} - covered == set()


def test_every_sick_implementation_says_what_its_fault_is() -> None:
    assert {family.__name__.rpartition(".")[2] for family in FAMILIES} == {
        sick.implementation.__module__.rpartition(".")[2] for sick in BANK.values()
    }
    assert [sick.name for sick in BANK.values() if not sick.implementation.__doc__] == []
