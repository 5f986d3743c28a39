"""What the fake device costs, beside the CPU that does its work and beside torch's tensors without data.

``pytest --benchmark-only --pyargs pytest_park.benchmarks -k fake_device`` prints the times, and the ratios below them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_park.benchmarks.models import MODELS, Model
from pytest_park.benchmarks.ratios import ratio
from pytest_park.sizes import MiB

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from pytest_park.fakegpu import FakeDevice


def test_an_operator(benchmark: BenchmarkFixture, fake_device: FakeDevice) -> None:
    benchmark.group = "fake device: w + w, 64 x 64"
    on_device, on_host = torch.ones(64, 64, device=fake_device.device), torch.ones(64, 64)
    with FakeTensorMode() as mode:
        without_data = torch.ones(64, 64)

        def fake_tensors() -> torch.Tensor:
            with mode:
                return without_data + without_data

    result = benchmark(lambda: on_device + on_device)
    benchmark.extra_info["times the CPU"] = ratio(lambda: on_device + on_device, lambda: on_host + on_host, calls=500)
    benchmark.extra_info["times FakeTensorMode"] = ratio(lambda: on_device + on_device, fake_tensors, calls=500)
    assert result.cpu().equal(on_host + on_host)


@pytest.mark.parametrize("build", MODELS.values(), ids=[name.replace(" ", "-") for name in MODELS])
@torch.no_grad()
def test_a_forward(benchmark: BenchmarkFixture, fake_device: FakeDevice, build: Callable[[], Model]) -> None:
    benchmark.group = "fake device: forward"
    model = build()
    there = copy.deepcopy(model.module).to(fake_device.device)
    result = benchmark(lambda: model.run(there, fake_device.device))
    benchmark.extra_info["times the CPU"] = ratio(
        lambda: model.run(there, fake_device.device), lambda: model.run(model.module, "cpu")
    )
    torch.testing.assert_close(result.cpu(), model.run(model.module, "cpu"))
    torch.Stream(device=fake_device.device)

    def unwatched() -> None:
        with fake_device.unwatched():
            model.run(there, fake_device.device)

    benchmark.extra_info["times itself, when the sanitizer watches"] = ratio(
        lambda: model.run(there, fake_device.device), unwatched
    )


@pytest.mark.parametrize("size", [512, MiB], ids=["512-B", "1-MiB"])
def test_an_allocation_and_its_end(benchmark: BenchmarkFixture, fake_device: FakeDevice, size: int) -> None:
    benchmark.group = "fake device: allocation and free"

    def allocate(device: torch.device | str) -> None:
        torch.empty(size, dtype=torch.uint8, device=device)

    benchmark(allocate, fake_device.device)
    benchmark.extra_info["times the CPU"] = ratio(
        lambda: allocate(fake_device.device), lambda: allocate("cpu"), calls=200
    )
    assert fake_device.allocated == 0
