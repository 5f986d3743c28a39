"""The contract over `park_core` on every class of the zoo, with lists of layers that are found automatically.

By default a class is asked every tenth of the questions that the contract has for it, another tenth than its
neighbours; with PARK_FULL_MATRIX=1 all of them, which takes about an hour.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from park_core import layerwise_offloadable
from pytest_park.contract import Parkable
from pytest_park.contract.examine import judge
from pytest_park.contract.host import set_aside, swift_collector
from pytest_park.contract.probes import Trait
from pytest_park.contract.registry import Check, all_checks
from pytest_park.fakegpu import FakeDevice, activate

from ..contract.test_park_core_keeps_the_contract import parkable_of
from .zoo import NAMES, build, inputs

STRIDE = 10 if os.environ.get("PARK_FULL_MATRIX", "0") in ("", "0") else 1

#: These bring modules of their own and would ask the same of every class. test_park_core_keeps_the_contract asks them.
ABOUT_NO_CLASS = (
    "c12_an_update_reaches_streamed_layers",
    "c14_a_component_over_a_parked_submodule",
    "c26_pieces_that_are_too_small",
    "c26_the_headroom_is_that_of_the_own_device",
    "c27_",
    "c28_",
    "c36_",
)
#: A backward needs the layers that streaming has released, so for these nothing is streamed.
GRADIENTS = "c33_"

Question = tuple[Check, str | None]


def parkable(name: str, device: FakeDevice, check: Check | None = None) -> Parkable:
    module = build(name).to(device.device)
    streams = check is None or not check.id.startswith(GRADIENTS)
    layerwise_offloadable(module, None if streams else [])
    made = parkable_of(module, inputs(name, module, device.device), module.layer_names)
    return replace(made, fake_device=device, adopt=None)


def questions(name: str) -> list[Question]:
    """Every check, in every variant, that is about something that this class has."""
    with activate() as device:
        subject = parkable(name, device)
        return [
            (check, variant)
            for check in all_checks()
            if not check.id.startswith(ABOUT_NO_CLASS)
            for variant, value in (check.variants or {None: check.on}).items()
            if all(trait.found_in(subject) for trait in (check.on, value) if isinstance(trait, Trait))
        ]


@pytest.mark.parametrize("name", NAMES)
def test_a_real_class_keeps_its_promises(name: str, record_property: Callable[[str, object], None]) -> None:
    outcomes: Counter[str] = Counter()
    findings = []
    with swift_collector():
        for check, variant in questions(name)[NAMES.index(name) % STRIDE :: STRIDE]:
            set_aside()
            with activate() as device:
                verdict = judge(check, variant, lambda device=device, check=check: parkable(name, device, check))
            outcomes[verdict.outcome if verdict.outcome == "kept" else f"{verdict.outcome}: {verdict.reason}"] += 1
            if verdict.finding is not None:
                findings.append(str(verdict.finding))
    record_property("verdicts", dict(outcomes))
    assert findings == []
