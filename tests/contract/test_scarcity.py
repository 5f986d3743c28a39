"""Memory is as scarce as a check says, wherever the allocator's reserve lies."""

from __future__ import annotations

import pytest
import torch

from pytest_park.contract.device import Device
from pytest_park.fakegpu import FakeDevice


@pytest.mark.fake_device(memory="256 MiB")
@pytest.mark.parametrize("wanted", [0, 4096, 5_000_000])
def test_the_headroom_is_what_was_wanted_beside_a_copy_stream_with_a_reserve(
    fake_device: FakeDevice, wanted: int
) -> None:
    layers = []
    for _ in range(2):
        with torch.Stream(device=fake_device.device):
            layers.append(torch.ones(1000, device=fake_device.device))  # the rest of its segment of 2 MiB lies free
    device = Device(fake_device.device, fake_device)
    device.set_headroom(wanted)
    assert device.headroom == wanted
    assert device.bytes == 2 * 4000
    device.relieve()
    assert device.headroom == fake_device.memory - device.allocated
