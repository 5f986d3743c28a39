"""Park and restore, beside a loop that does nothing but copy the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from park_core import LayerwiseOffloadableModuleMixin, OffloadConfig
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
    "1000-of-4-KiB": Weights(1000, 4 * KiB),
    "16-of-4-MiB": Weights(16, 4 * MiB),
    "2-of-64-MiB": Weights(2, 64 * MiB),
}


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


def offload(component: Component, park_device: ParkDevice, *, keep_host_copies: bool) -> None:
    config = OffloadConfig(parking="always", keep_host_copies=keep_host_copies)
    component.configure_layerwise_offload(config, device=park_device.device)


def intact(component: Component) -> bool:
    return all(bool((weight == number % 100).all()) for number, weight in enumerate(component.non_layer_weights()))


def test_park(
    transfer_benchmark: TransferBenchmark, component: Component, weights: Weights, park_device: ParkDevice
) -> None:
    offload(component, park_device, keep_host_copies=False)
    report = transfer_benchmark(
        component.park_non_layer_weights,
        setup=component.restore_non_layer_weights,
        bytes=weights.bytes,
        direction="d2h",
    )
    assert report.bytes_to_host == report.bytes_freed == weights.bytes
    component.restore_non_layer_weights()
    assert intact(component)


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
    )
    assert report.bytes_to_host == 0
    assert report.bytes_freed == weights.bytes
    component.restore_non_layer_weights()
    assert intact(component)


def test_park_by_a_bare_copy(transfer_benchmark: TransferBenchmark, component: Component, weights: Weights) -> None:
    copies = transfer_benchmark(
        lambda: [weight.detach().to("cpu", copy=True) for weight in component.non_layer_weights()],
        bytes=weights.bytes,
        direction="d2h",
    )
    assert len(copies) == weights.count


def test_restore(
    transfer_benchmark: TransferBenchmark, component: Component, weights: Weights, park_device: ParkDevice
) -> None:
    offload(component, park_device, keep_host_copies=True)
    report = transfer_benchmark(
        component.restore_non_layer_weights,
        setup=component.park_non_layer_weights,
        bytes=weights.bytes,
        direction="h2d",
    )
    assert report.bytes_to_device == report.bytes_restored == weights.bytes
    assert intact(component)


def test_restore_by_a_bare_copy(
    transfer_benchmark: TransferBenchmark, component: Component, weights: Weights, park_device: ParkDevice
) -> None:
    copies = [weight.detach().to("cpu", copy=True) for weight in component.non_layer_weights()]
    restored = transfer_benchmark(
        lambda: [copy.to(park_device.device) for copy in copies],
        bytes=weights.bytes,
        direction="h2d",
    )
    assert len(restored) == weights.count
