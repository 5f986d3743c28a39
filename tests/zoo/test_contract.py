"""The contract over `park_core` on every class of the zoo, with lists of layers that are found automatically.

By default a class is asked a part of the questions of the contract, another part than its neighbours, so that each
question is asked of several classes; with PARK_FULL_ZOO=1 (`tox -e zoo`) every class is asked everything, which is ten
seconds to a minute of processor time for each.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from park_core import OffloadConfig, layerwise_offloadable
from pytest_park.contract import Parkable
from pytest_park.contract.examine import judge
from pytest_park.contract.host import set_aside, swift_collector
from pytest_park.contract.registry import Check, all_checks
from pytest_park.fakegpu import FakeDevice, activate

from ..contract.test_park_core_keeps_the_contract import parkable_of
from .zoo import NAMES, build, inputs

FULL = os.environ.get("PARK_FULL_ZOO", "0") not in ("", "0")
PARTS = 1 if FULL else 20
QUESTIONS: list[tuple[Check, str | None]] = [
    (check, variant) for check in all_checks() for variant in check.variants or (None,)
]
#: Tiny weights beside activations that are not: with this there is room for a forward where parking pays.
CONFIG = OffloadConfig(performance_mode="memory", significance=0.001)
#: A backward needs the layers that streaming has released, so for these nothing is streamed.
GRADIENTS = "c33_"


def layers_of(name: str) -> list[str]:
    """The lists of layers that are found automatically; they are the same in every module of a class."""
    with activate() as device:
        return list(layerwise_offloadable(build(name).to(device.device), None).layer_names)


def parkable(name: str, layers: list[str], device: FakeDevice) -> Parkable:
    module = build(name).to(device.device)
    made = parkable_of(module, inputs(name, module, device.device), layers, CONFIG)
    # Without adopt, what the class lacks is not asked of another module instead.
    stated = {"significance": CONFIG.significance, "keeps_host_copies": CONFIG.keep_host_copies}
    return replace(made, fake_device=device, adopt=None, **stated)


@pytest.mark.parametrize("name", NAMES)
def test_a_real_class_keeps_its_promises(name: str, record_property: Callable[[str, object], None]) -> None:
    outcomes: Counter[str] = Counter()
    findings = []
    layers = layers_of(name)
    with swift_collector():
        for check, variant in QUESTIONS[NAMES.index(name) % PARTS :: PARTS]:
            set_aside()
            with activate() as device:
                mine = [] if check.id.startswith(GRADIENTS) else layers
                made = partial(parkable, name, mine, device)
                verdict = judge(check, variant, made, repeats=bool(outcomes))
            why = verdict.reason.partition(f" in {name}")[0]
            outcomes[f"{verdict.outcome}: {why}" if why else verdict.outcome] += 1
            if verdict.finding is not None:
                findings.append(str(verdict.finding))
    record_property("verdicts", dict(outcomes))
    assert findings == []


def test_every_question_is_asked_of_several_classes() -> None:
    asked = Counter(index for place in range(len(NAMES)) for index in range(place % PARTS, len(QUESTIONS), PARTS))
    assert len(asked) == len(QUESTIONS)
    assert min(asked.values()) >= 6
