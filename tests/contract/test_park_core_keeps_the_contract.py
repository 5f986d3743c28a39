"""The contract over `park_core`: every promise is tested here, on modules that have what the promise is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from park_core import (
    PARK_SIGNIFICANCE,
    ComponentUse,
    LayerwiseOffloadStrategy,
    OffloadConfig,
    ResidencyState,
    layerwise_offloadable,
)
from park_core.component import offload_of
from park_core.storage import StorageGroup
from park_core.survey import survey
from pytest_park.contract import Parkable, ParkableContract
from pytest_park.fakegpu import FakeDevice

from .sick.patient import component

MEMORY = OffloadConfig(performance_mode="memory")


def non_layer_groups(module: nn.Module) -> set[StorageGroup]:
    found = survey(module, "component")
    return {group for group in (*found.resident, *found.parked) if not group.streamed and group not in found.buffers}


def parkable_of(
    module: nn.Module, inputs: Any, streamed: Sequence[str] = (), config: OffloadConfig = MEMORY
) -> Parkable:
    """*module* under layerwise offload, with everything that the contract can ask about declared."""
    device = next(weight.device for weight in module.parameters() if weight.device.type != "cpu")
    layerwise_offloadable(module, list(streamed), config=config, device=device, component_name="component")
    offload = offload_of(module)
    assert offload is not None
    strategy, use, state = LayerwiseOffloadStrategy(), ComponentUse(component_name="component"), ResidencyState(device)
    return Parkable(
        module,
        inputs,
        adopt=parkable_of,
        significance=PARK_SIGNIFICANCE,
        park_for=lambda need: module.park_non_layer_weights(need=need),
        begin_use=lambda: strategy.prepare_for_use(module, use, state),
        finish_use=lambda: strategy.finish_use(module, use, state),
        finish_request=lambda: strategy.finish_request(module, use, state, preferred=False),
        weight_bytes=lambda: sum(group.nbytes for group in non_layer_groups(module)),
        host_bytes=lambda: sum(g.host.storage.nbytes() for g in non_layer_groups(module) if g.host is not None),
        keeps_host_copies=False,
        ends={"remove": offload.remove},
        reconfigure=lambda: module.configure_layerwise_offload(config, device=device),
        pinned=config.pin_memory,
    )


@pytest.mark.fake_device(count=2)
class TestParkCore(ParkableContract):
    @pytest.fixture
    def parkable(self, fake_device: FakeDevice) -> Parkable:
        return parkable_of(*component(fake_device.device))
