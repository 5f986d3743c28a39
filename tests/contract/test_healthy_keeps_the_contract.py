"""The contract finds nothing wrong with the healthy implementation that the sick ones are made from."""

from __future__ import annotations

import pytest

from pytest_park.contract import Parkable, ParkableContract
from pytest_park.fakegpu import FakeDevice

from .sick.healthy import Healthy, parkable
from .sick.patient import component


@pytest.mark.fake_device(count=2)
class TestHealthyImplementation(ParkableContract):
    @pytest.fixture
    def parkable(self, fake_device: FakeDevice) -> Parkable:
        return parkable(Healthy, *component(fake_device.device))
