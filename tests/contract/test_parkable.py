"""What `Parkable` finds out by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from park_core import layerwise_offloadable
from pytest_park.contract import Parkable
from pytest_park.fakegpu import FakeDevice


def nothing() -> None:
    pass


@pytest.mark.fake_device(count=2)
def test_the_device_of_the_weights_and_the_fake_one_that_this_is(fake_device: FakeDevice) -> None:
    second = fake_device.devices[1]
    on_second = Parkable(nn.Linear(2, 2, device=second.device), park=nothing, restore=nothing)
    assert (on_second.device, on_second.fake_device) == (second.device, second)
    on_host = Parkable(nn.Linear(2, 2), park=nothing, restore=nothing)
    assert (on_host.device, on_host.fake_device) == (torch.device("cpu"), None)


def test_the_verbs_and_names_of_park_core_and_sglang(fake_device: FakeDevice) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))
    layerwise_offloadable(module, ["1"], device=fake_device.device)
    parkable = Parkable(module)
    assert parkable.park == module.park_non_layer_weights
    assert parkable.restore == module.restore_non_layer_weights
    assert parkable.update == module.update_cpu_weights
    assert parkable.streamed == ("1",)
