"""The contract over a component of 20 modules and 2 million parameters, which is larger than what the other tests use.

How long that takes is for the clock of whoever runs it: docs/contract.md has the command.
"""

from __future__ import annotations

import pytest
from torch import nn

from pytest_park.contract import Parkable, ParkableContract
from pytest_park.contract.probes import batch, filled, linear
from pytest_park.fakegpu import FakeDevice

from .test_park_core_keeps_the_contract import parkable_of

WIDTH = 458


@pytest.mark.fake_device(count=2)
class TestTwoMillionParameters(ParkableContract):
    @pytest.fixture
    def parkable(self, fake_device: FakeDevice) -> Parkable:
        device = fake_device.device
        layers = [
            layer
            for _ in range(10)
            for layer in (linear(WIDTH, WIDTH, device), filled(nn.LayerNorm(WIDTH, device=device)))
        ]
        component = nn.Sequential(*layers)
        assert len(component) == 20
        assert sum(weight.numel() for weight in component.parameters()) > 2_000_000
        return parkable_of(component, (batch(device, WIDTH),))
