"""Park and restore, beside a loop that does nothing but copy the same weights and assign ``.data``.

The ratios are measured in turn in one run. The aims: within 1.15 times the loop for large weights that are not staged,
and twice the loop for ten thousand small ones; the decision not to park takes less than a twentieth of a park; a second
park of unchanged weights moves nothing; a forward between a restore and a park takes as long as without parking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from park_core import LayerwiseOffloadableModuleMixin, OffloadConfig, layerwise_offloadable
from pytest_park.benchmarks.ratios import least_seconds, wall_clock
from pytest_park.sizes import KiB, MiB

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from pytest_park.devices import ParkDevice
    from pytest_park.transfers import TransferBenchmark


@dataclass(frozen=True)
class Weights:
    """How the bytes of a component are cut: ``count`` weights of ``size`` bytes each."""

    count: int
    size: int

    @property
    def bytes(self) -> int:
        return self.count * self.size


CUTS = {
    "10000-of-4-KiB": Weights(10_000, 4 * KiB),
    "16-of-4-MiB": Weights(16, 4 * MiB),
    "4-of-64-MiB": Weights(4, 64 * MiB),
}


#: Large weights go through pinned buffers, which on the fake device is a second copy in host memory; the loop has one.
STAGING = {"staged": True, "not staged": False}
ROUNDS = 5  # ten thousand weights take a second on the fake device


class Component(LayerwiseOffloadableModuleMixin, nn.Module):
    """Two streamed layers, and the non-layer weights that the benchmarks are about."""

    layer_names = ("layers",)

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        for number in range(weights.count):
            weight = torch.full((weights.size // 2,), number % 100, dtype=torch.bfloat16)
            self.register_parameter(f"weight_{number}", nn.Parameter(weight, requires_grad=False))

    def non_layer_weights(self) -> list[nn.Parameter]:
        return [weight for name, weight in self.named_parameters() if name.startswith("weight_")]


@pytest.fixture(params=list(CUTS.values()), ids=list(CUTS))
def weights(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Weights:
    benchmark.group = f"{request.node.originalname.split('_')[1]}, {request.node.callspec.id}"
    chosen: Weights = request.param
    return chosen


@pytest.fixture
def component(weights: Weights, park_device: ParkDevice) -> Component:
    return Component(weights).to(park_device.device)


def offload(component: Component, park_device: ParkDevice, *, keep_host_copies: bool, staging: bool = True) -> None:
    config = OffloadConfig(parking="always", keep_host_copies=keep_host_copies, staging=staging)
    component.configure_layerwise_offload(config, device=park_device.device)


def intact(component: Component) -> bool:
    return all(bool((weight == number % 100).all()) for number, weight in enumerate(component.non_layer_weights()))


class BareLoop:
    """Parks and restores by copying each weight and assigning its ``.data``, and nothing else."""

    def __init__(self, component: Component, device: torch.device) -> None:
        self.weights, self.device = component.non_layer_weights(), device
        self.placeholder = torch.empty(0, dtype=torch.bfloat16, device=device)
        self.copies: list[torch.Tensor] = []

    def park(self) -> None:
        self.copies = [weight.detach().to("cpu", copy=True) for weight in self.weights]
        for weight in self.weights:
            weight.data = self.placeholder

    def restore(self) -> None:
        for weight, copy in zip(self.weights, self.copies, strict=True):
            weight.data = copy.to(self.device)


def ratio(
    device: torch.device,
    this: Callable[[], object],
    undo: Callable[[], object],
    other: Callable[[], object],
    undo_other: Callable[[], object],
    rounds: int = 3,
) -> float:
    """Wall time of *this* over that of *other*, each the least of some rounds, in turn. Undoing is not in it."""
    mine, _, others, _ = least_seconds(this, undo, other, undo_other, rounds=rounds, clock=wall_clock(device))
    return mine / others


@pytest.fixture
def bare_loop(weights: Weights, park_device: ParkDevice) -> BareLoop:
    """Over weights of its own."""
    return BareLoop(Component(weights).to(park_device.device), park_device.device)


def test_park(
    transfer_benchmark: TransferBenchmark,
    benchmark: BenchmarkFixture,
    component: Component,
    bare_loop: BareLoop,
    weights: Weights,
    park_device: ParkDevice,
) -> None:
    offload(component, park_device, keep_host_copies=False)
    park, restore = component.park_non_layer_weights, component.restore_non_layer_weights
    report = transfer_benchmark(park, setup=restore, bytes=weights.bytes, direction="d2h", rounds=ROUNDS)
    assert report.bytes_to_host == report.bytes_freed == weights.bytes
    restore()
    assert intact(component)
    for name, staging in STAGING.items():
        offload(component, park_device, keep_host_copies=False, staging=staging)
        benchmark.extra_info[f"times the bare loop, {name}"] = ratio(
            park_device.device, park, restore, bare_loop.park, bare_loop.restore
        )


def test_park_unchanged_weights(
    transfer_benchmark: TransferBenchmark, component: Component, weights: Weights, park_device: ParkDevice
) -> None:
    """The host copies are still right: that is found out on the device, and nothing is transferred."""
    offload(component, park_device, keep_host_copies=True)
    component.park_non_layer_weights()
    report = transfer_benchmark(
        component.park_non_layer_weights,
        setup=component.restore_non_layer_weights,
        bytes=0,
        direction="d2h",
        rounds=ROUNDS,
    )
    assert report.bytes_to_host == 0
    assert report.bytes_freed == weights.bytes
    component.restore_non_layer_weights()
    assert intact(component)


def test_park_by_a_bare_loop(transfer_benchmark: TransferBenchmark, bare_loop: BareLoop, weights: Weights) -> None:
    bare_loop.park()
    transfer_benchmark(bare_loop.park, setup=bare_loop.restore, bytes=weights.bytes, direction="d2h", rounds=ROUNDS)
    assert len(bare_loop.copies) == weights.count


def test_park_is_decided_against(
    benchmark: BenchmarkFixture, component: Component, weights: Weights, park_device: ParkDevice
) -> None:
    """What the question costs, each time that there is room."""
    roomy = OffloadConfig(performance_mode="memory", significance=10.0, keep_host_copies=False)  # type: ignore[arg-type]
    component.configure_layerwise_offload(roomy, device=park_device.device)
    report = benchmark.pedantic(component.park_non_layer_weights, rounds=10, warmup_rounds=1)  # type: ignore[no-untyped-call]
    assert (report.decision.verdict, report.bytes_freed) == ("keep", 0)
    parked = Component(weights).to(park_device.device)
    offload(parked, park_device, keep_host_copies=False)
    benchmark.extra_info["share of a park"] = ratio(
        park_device.device,
        component.park_non_layer_weights,
        lambda: None,
        parked.park_non_layer_weights,
        parked.restore_non_layer_weights,
    )


def test_restore(
    transfer_benchmark: TransferBenchmark,
    benchmark: BenchmarkFixture,
    component: Component,
    bare_loop: BareLoop,
    weights: Weights,
    park_device: ParkDevice,
) -> None:
    offload(component, park_device, keep_host_copies=True)
    park, restore = component.park_non_layer_weights, component.restore_non_layer_weights
    report = transfer_benchmark(restore, setup=park, bytes=weights.bytes, direction="h2d", rounds=ROUNDS)
    assert report.bytes_to_device == report.bytes_restored == weights.bytes
    assert intact(component)
    bare_loop.park()
    for name, staging in STAGING.items():
        offload(component, park_device, keep_host_copies=True, staging=staging)
        park()
        benchmark.extra_info[f"times the bare loop, {name}"] = ratio(
            park_device.device, restore, park, bare_loop.restore, bare_loop.park
        )
        restore()


def test_restore_by_a_bare_loop(transfer_benchmark: TransferBenchmark, bare_loop: BareLoop, weights: Weights) -> None:
    transfer_benchmark(bare_loop.restore, setup=bare_loop.park, bytes=weights.bytes, direction="h2d", rounds=ROUNDS)
    assert bare_loop.weights[0].shape == bare_loop.copies[0].shape


def test_forward_between_uses(benchmark: BenchmarkFixture, park_device: ParkDevice) -> None:
    """A component that was parked and restored, beside one that never heard of parking."""
    benchmark.group = "forward"
    plain, parked = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).to(park_device.device) for _ in range(2))
    layerwise_offloadable(parked, [], config=OffloadConfig(parking="always"), device=park_device.device)
    parked.park_non_layer_weights()  # type: ignore[operator]
    parked.restore_non_layer_weights()  # type: ignore[operator]
    rows = torch.ones(8, 64, device=park_device.device)
    with torch.no_grad():
        result = benchmark(parked, rows)
        benchmark.extra_info["times without parking"] = ratio(
            park_device.device, lambda: parked(rows), lambda: None, lambda: plain(rows), lambda: None, rounds=200
        )
    assert result.shape == (8, 64)
