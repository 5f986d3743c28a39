"""Random modules: what the strategies make, that `park_core` keeps its promises on them, and that they find faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings

from pytest_park.contract import Parkable
from pytest_park.contract.case import Case, flat_tensors
from pytest_park.contract.examine import judge
from pytest_park.contract.host import set_aside, swift_collector
from pytest_park.contract.layers import PARAMETRIZED
from pytest_park.contract.odd_weights import DTYPES, SHAPES, VIEWS
from pytest_park.contract.registry import all_checks
from pytest_park.contract.snapshot import Snapshot
from pytest_park.contract.strategies import Tree, trees
from pytest_park.contract.traits import BUFFERS, NESTED, SHARING, STREAMED, Trait
from pytest_park.fakegpu import FakeDevice

from .sick.healthy import Healthy, parkable
from .sick.sharing import UntiesParameters
from .sick.values import LosesStrides, MaterialisesExpandedViews, SeversSharedStorages, TakesFloat8ForBytes
from .test_park_core_keeps_the_contract import parkable_of

# Derandomized: the same modules in every run, so that a failure is one of the change and not of the day.
random_modules = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
#: The first example will do, it need not be the smallest one.
quick_search = settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

AS_IT_IS = "the module as it is"
#: Round trip, layout, storages, ties, and the repeats of both verbs.
CHECKS = {
    "c01_every": AS_IT_IS,
    "c01_the_output": None,
    "c03_": AS_IT_IS,
    "c04_": "weights over one storage",
    "c05_": "2 parks, huge headroom",
    "c06_": "after a cycle",
}


def findings(make: Callable[[], Parkable]) -> list[str]:
    wanted = [(one, variant) for one in all_checks() for start, variant in CHECKS.items() if one.id.startswith(start)]

    def fresh() -> Parkable:
        set_aside()
        return make()

    with swift_collector():
        verdicts = [judge(one, variant, fresh) for one, variant in wanted]
    return [str(verdict.finding) for verdict in verdicts if verdict.finding is not None]


@given(tree=trees())
@random_modules
def test_park_core_keeps_round_trip_and_idempotence(fake_device: FakeDevice, tree: Tree) -> None:
    def make() -> Parkable:
        device = fake_device.device
        made = parkable_of(tree.build(device), tree.inputs(device), tree.streamed)
        return replace(made, fake_device=fake_device, adopt=None)

    assert findings(make) == []


@given(tree=trees(streamed=False))
@random_modules
def test_the_healthy_implementation_does_too(fake_device: FakeDevice, tree: Tree) -> None:
    assert findings(lambda: made_by(Healthy, tree, fake_device)) == []


@given(tree=trees())
@random_modules
def test_two_modules_of_one_tree_are_equal_and_share_nothing(fake_device: FakeDevice, tree: Tree) -> None:
    first, second = tree.build(fake_device.device), tree.build(fake_device.device)
    aspects = ("values", "dtype", "device", "layout")
    assert Snapshot(first).differences(Snapshot(second), aspects) == []
    storages = [{t.untyped_storage()._cdata for t in (*m.parameters(), *m.buffers())} for m in (first, second)]
    assert storages[0] & storages[1] == set()
    with torch.no_grad():
        (one,), (other,) = (flat_tensors(module(*tree.inputs(fake_device.device))) for module in (first, second))
    assert torch.equal(one, other)
    assert one.isfinite().all()


@pytest.mark.parametrize(
    "trait",
    [*DTYPES.values(), *SHAPES.values(), *VIEWS.values(), *SHARING.values(), BUFFERS, NESTED, PARAMETRIZED, STREAMED],
    ids=lambda trait: trait.name,
)
def test_every_trait_of_the_contract_occurs(fake_device: FakeDevice, trait: Trait) -> None:
    if trait.name == "channels_last_3d weights":
        pytest.skip("five dimensions are one too many for the strategies")

    def has_it(tree: Tree) -> bool:
        made = Parkable(tree.build(fake_device.device), park=lambda: None, restore=lambda: None, streamed=tree.streamed)
        return trait.found_in(made)

    with swift_collector():
        find(trees(), has_it, settings=quick_search)


@pytest.mark.parametrize(
    "implementation",
    [LosesStrides, MaterialisesExpandedViews, SeversSharedStorages, TakesFloat8ForBytes, UntiesParameters],
)
def test_a_sick_implementation_is_caught(fake_device: FakeDevice, implementation: type[Healthy]) -> None:
    def is_caught(tree: Tree) -> bool:
        with Case(made_by(implementation, tree, fake_device)) as case:
            case.cycle()
            return bool(
                case.before.differences(case.snapshot(), ("values", "layout", "storage", "sharing", "identity"))
            )

    with swift_collector():
        find(trees(streamed=False), is_caught, settings=quick_search)


def made_by(implementation: type[Healthy], tree: Tree, device: FakeDevice) -> Parkable:
    made = parkable(implementation, tree.build(device.device), tree.inputs(device.device))
    return replace(made, fake_device=device, adopt=None)
