"""diffusers' group offloading by blocks: blocks are streamed, the rest is a group that each forward brings and takes.

That group stays on the device for as long as the forward runs. Here it stays until it is parked, so that there is
something to park: ``forward`` brings it back after each use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.hooks import apply_group_offloading
from torch import nn

from pytest_park.contract import Parkable
from pytest_park.contract.parkable import device_of
from pytest_park.contract.probes import Stack, batch
from pytest_park.fakegpu import FakeDevice

from .first_state import first_state_kept


def component(gpu: FakeDevice) -> Parkable:
    return parkable_of(Stack(gpu.device), batch(gpu.device), ("blocks",))


def parkable_of(module: nn.Module, inputs: Any, streamed: Sequence[str] = ()) -> Parkable:
    device = device_of(module)
    with first_state_kept(module, streamed):
        apply_group_offloading(module, onload_device=device, num_blocks_per_group=1)
        group = module._diffusers_hook.get_hook("group_offloading").group
        group.onload_()

    def forward(module: nn.Module, *arguments: torch.Tensor) -> Any:
        result = module(*arguments)
        group.onload_()
        return result

    return Parkable(
        module,
        inputs,
        park=group.offload_,
        restore=group.onload_,
        streamed=streamed,
        forward=forward,
        adopt=parkable_of,
        device=device,
        finish_use=group.offload_,
        finish_request=group.offload_,
        keeps_host_copies=False,
    )
