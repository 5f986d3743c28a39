"""One tensor between host and device, three ways: pageable memory as the driver moves it, the same memory staged
through a few pinned buffers (``park_core.transfer``), and memory that is pinned altogether.

``extra_info`` of the staged ones tells how they compare with the other two, all measured in turn. The aim on a GPU
from 64 MiB on: three times as fast as pageable memory, and 0.8 of the pinned rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import nn

from park_core.host_copy import HostCopy
from park_core.memory import host_headroom
from park_core.survey import survey
from park_core.transfer import Transfer, transfer
from pytest_park.benchmarks.ratios import least_seconds, wall_clock
from pytest_park.sizes import format_bytes, parse_size

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from pytest_park.devices import ParkDevice
    from pytest_park.transfers import TransferBenchmark

ON_THE_FAKE = ["64 KiB", "1 MiB", "64 MiB"]
ON_A_GPU = ["64 KiB", "1 MiB", "16 MiB", "64 MiB", "256 MiB", "1 GiB", "4 GiB"]


class Way(NamedTuple):
    """A way to move the bytes, where they arrive, and what they are then."""

    move: Callable[[], object]
    target: Callable[[], torch.Tensor]
    value: int


WAYS = ("pageable", "staged", "pinned")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sizes = ON_A_GPU if metafunc.config.getoption("park_real_gpu") else ON_THE_FAKE
    metafunc.parametrize("size", sizes, ids=[size.replace(" ", "-") for size in sizes])
    metafunc.parametrize("way", WAYS)


def ways(device: torch.device, nbytes: int, direction: str) -> dict[str, Way]:
    """The ways to move so many bytes: ``h2d`` (to the device) or ``d2h``. Each has memory of its own at both ends."""
    room = host_headroom().bytes
    if room < 3 * nbytes:  # pageable twice, pinned once
        pytest.skip(f"the host has room for {format_bytes(room)}, this takes three times {format_bytes(nbytes)}")
    component = nn.Module()
    component.weight = nn.Parameter(torch.full((nbytes,), 1, dtype=torch.uint8, device=device), requires_grad=False)
    ((group, storage),) = survey(component, "weight").resident.items()
    on_device = component.weight.detach()
    host = {way: torch.full((nbytes,), 2, dtype=torch.uint8, pin_memory=way == "pinned") for way in WAYS}
    staged, copy = transfer(device, nbytes), HostCopy(host["staged"].untyped_storage(), memory=host["staged"])
    group.host = copy
    if direction == "d2h":
        copy = Transfer().to_host(group, storage)  # nobody else may see it, or it would not be used again
        return {
            "pageable": Way(lambda: host["pageable"].copy_(on_device), lambda: host["pageable"], 1),
            "staged": Way(lambda: staged.to_host(group, storage, into=copy), lambda: copy.memory, 1),  # type: ignore[arg-type,return-value]
            "pinned": Way(lambda: host["pinned"].copy_(on_device, non_blocking=True), lambda: host["pinned"], 1),
        }
    return {
        "pageable": Way(lambda: on_device.copy_(host["pageable"]), lambda: on_device, 2),
        "staged": Way(lambda: staged.fill(on_device, group), lambda: on_device, 2),
        "pinned": Way(lambda: on_device.copy_(host["pinned"], non_blocking=True), lambda: on_device, 2),
    }


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_transfer(
    transfer_benchmark: TransferBenchmark,
    benchmark: BenchmarkFixture,
    park_device: ParkDevice,
    direction: str,
    size: str,
    way: str,
) -> None:
    benchmark.group = f"{'host to device' if direction == 'h2d' else 'device to host'}, {size}"
    peers = ways(park_device.device, parse_size(size), direction)
    move, target, value = peers[way]
    transfer_benchmark(move, bytes=size, direction=direction)  # type: ignore[arg-type]
    assert torch.equal(target().cpu(), torch.full((parse_size(size),), value, dtype=torch.uint8))
    if way == "staged" and benchmark.stats is not None:
        moves = (peers[name].move for name in WAYS)
        pageable, staged, pinned = least_seconds(*moves, rounds=5, clock=wall_clock(park_device.device))
        benchmark.extra_info["times as fast as pageable"] = pageable / staged
        benchmark.extra_info["share of the pinned rate"] = pinned / staged
