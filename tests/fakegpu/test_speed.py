"""The fake device is fast enough for whole models. The limits are generous, because machines differ and are shared;
``pytest_park/benchmarks/test_fake_device.py`` measures what it really is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_park.benchmarks.models import MODELS, Model
from pytest_park.benchmarks.ratios import ratio
from pytest_park.fakegpu import FakeDevice


def test_an_operator_is_four_times_faster_than_on_tensors_without_data(fake_device: FakeDevice) -> None:
    weight = torch.ones(64, 64, device=fake_device.device)
    with FakeTensorMode() as mode:
        without_data = torch.ones(64, 64)

    def fake_tensors() -> torch.Tensor:
        with mode:
            return without_data + without_data

    assert ratio(fake_tensors, lambda: weight + weight, calls=200) > 4


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_watching_several_streams_costs_less_than_the_forward_itself(
    fake_device: FakeDevice, build: Callable[[], Model]
) -> None:
    model = build()
    there = copy.deepcopy(model.module).to(fake_device.device)
    torch.Stream(device=fake_device.device)

    def unwatched() -> None:
        with fake_device.unwatched():
            model.run(there, fake_device.device)

    assert ratio(lambda: model.run(there, fake_device.device), unwatched) < 2


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_a_forward_takes_less_than_six_times_the_cpus(fake_device: FakeDevice, build: Callable[[], Model]) -> None:
    model = build()
    there = copy.deepcopy(model.module).to(fake_device.device)
    assert ratio(lambda: model.run(there, fake_device.device), lambda: model.run(model.module, "cpu")) < 6
