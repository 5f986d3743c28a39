"""Every check was seen red on an implementation that has just its fault, and the healthy one is green everywhere.

By default each sick implementation meets the checks that must see it and a few others. With PARK_FULL_MATRIX=1 it meets
every check in every variant, which takes some minutes.
"""

from __future__ import annotations

import os

import pytest

from pytest_park.contract.registry import all_checks
from pytest_park.fakegpu import FakeDevice

from .matrix import FAMILIES, SAMPLE, ids, red_checks
from .sick.bank import BANK, Sick
from .sick.healthy import Healthy

FULL = os.environ.get("PARK_FULL_MATRIX", "0") not in ("", "0")

pytestmark = pytest.mark.fake_device(count=2, memory="256 MiB")


def test_the_healthy_implementation_keeps_every_promise(fake_device: FakeDevice) -> None:
    assert red_checks(Healthy, fake_device) == {}


@pytest.mark.parametrize("sick", BANK.values(), ids=lambda sick: sick.name)
def test_a_sick_implementation_turns_exactly_its_checks_red(sick: Sick, fake_device: FakeDevice) -> None:
    expected = ids(sick.meant) | ids(sick.follows)
    among = None if FULL else expected | ids(SAMPLE)
    assert set(red_checks(sick.implementation, fake_device, among, all_variants=FULL)) == expected


def test_every_check_has_a_sick_implementation() -> None:
    covered = {check for sick in BANK.values() for check in ids(sick.meant)}
    assert {check.id for check in all_checks()} - covered == set()


def test_every_sick_implementation_says_what_its_fault_is() -> None:
    assert {family.__name__.rpartition(".")[2] for family in FAMILIES} == {
        sick.implementation.__module__.rpartition(".")[2] for sick in BANK.values()
    }
    assert [sick.name for sick in BANK.values() if not sick.implementation.__doc__] == []
