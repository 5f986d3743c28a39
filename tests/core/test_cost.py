"""Parking costs little beside the copies that it makes. The limits are generous, because machines differ and are
shared; ``pytest_park/benchmarks/test_parking.py`` measures what it really is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from park_core import OffloadConfig, Parking
from pytest_park.benchmarks.ratios import least_seconds
from pytest_park.fakegpu import FakeDevice
from pytest_park.sizes import KiB, MiB


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Costs:
    """Each the least of several rounds in processor time, divided by another such time of the same run.

    Attributes:
        park: times the bare loop to the host. Both free the device memory, and fill host memory that is new.
        restore: times the bare loop to the device. Both give the host memory back.
        gate: a park that decides to keep the weights, as a part of one that parks them.
    """

    park: float
    restore: float
    gate: float


def costs(device: torch.device, count: int, size: int, rounds: int) -> Costs:
    """Of weights in modules of two, as weights and biases are, by the plain transfer: one blocking copy for each."""
    module = nn.ModuleList(
        nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=torch.uint8), requires_grad=False) for _ in range(2))
        for _ in range(count // 2)
    ).to(device)
    weights, copies = list(module.parameters()), []
    placeholder = torch.empty(0, dtype=torch.uint8, device=device)
    keeping = Parking(module, "keeping", OffloadConfig(performance_mode="memory"))
    always = Parking(module, "always", OffloadConfig(parking="always", keep_host_copies=False, staging=False))

    def gate() -> None:
        assert keeping.park().decision.verdict == "keep"

    def park() -> None:
        assert always.park().bytes_freed == count * size

    def down() -> None:
        for weight in weights:
            copies.append(weight.detach().to("cpu", copy=True))
            weight.data = placeholder

    def up() -> None:
        for weight, copy in zip(weights, copies, strict=True):
            weight.data = copy.to(device)
        copies.clear()

    steps: list[Callable[[], object]] = [gate, park, always.restore, down, up]
    gated, parked, restored, went, came = least_seconds(*steps, rounds=rounds, clock=time.process_time)
    return Costs(park=parked / went, restore=restored / came, gate=gated / parked)


def test_small_weights_take_a_few_times_a_bare_loop_and_the_decision_a_small_part_of_it(
    fake_device: FakeDevice,
) -> None:
    found = costs(fake_device.device, 2000, 4 * KiB, rounds=5)
    assert found.park < 4
    assert found.restore < 4
    assert found.gate < 0.12


def test_large_weights_take_little_more_than_a_bare_loop(fake_device: FakeDevice) -> None:
    found = costs(fake_device.device, 4, 32 * MiB, rounds=5)
    assert found.park < 1.5
    assert found.restore < 1.5
    assert found.gate < 0.05
