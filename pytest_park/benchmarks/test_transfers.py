"""Bare copies of one tensor between host and device: what everything else is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_park.sizes import parse_size

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from pytest_park.devices import ParkDevice
    from pytest_park.transfers import TransferBenchmark

HostMemory = Callable[[int], torch.Tensor]

SIZES = ["64 KiB", "1 MiB", "16 MiB", "128 MiB"]

by_size = pytest.mark.parametrize("size", SIZES, ids=[size.replace(" ", "-") for size in SIZES])


@pytest.fixture(params=["pageable", "pinned"])
def host_memory(request: pytest.FixtureRequest, park_device: ParkDevice) -> HostMemory:
    """A function that gives a host tensor of some bytes in this kind of memory."""

    def make(size: int) -> torch.Tensor:
        tensor = torch.ones(size, dtype=torch.uint8)
        return tensor.pin_memory() if request.param == "pinned" else tensor

    return make


@by_size
def test_h2d(
    transfer_benchmark: TransferBenchmark,
    benchmark: BenchmarkFixture,
    park_device: ParkDevice,
    host_memory: HostMemory,
    size: str,
) -> None:
    benchmark.group = f"host to device, {size}"
    host = host_memory(parse_size(size))
    target = torch.empty_like(host, device=park_device.device)
    transfer_benchmark(lambda: target.copy_(host, non_blocking=True), bytes=size, direction="h2d")
    assert torch.equal(target.cpu(), host)


@by_size
def test_d2h(
    transfer_benchmark: TransferBenchmark,
    benchmark: BenchmarkFixture,
    park_device: ParkDevice,
    host_memory: HostMemory,
    size: str,
) -> None:
    benchmark.group = f"device to host, {size}"
    target = host_memory(parse_size(size))
    source = torch.full_like(target, 2, device=park_device.device)
    transfer_benchmark(lambda: target.copy_(source, non_blocking=True), bytes=size, direction="d2h")
    assert torch.equal(target, torch.full_like(target, 2))
