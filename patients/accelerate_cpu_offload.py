"""accelerate's `cpu_offload_with_hook`: the whole component is parked, and restored before its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import cpu_offload_with_hook
from torch import nn

from pytest_park.contract import NotApplicable, Parkable
from pytest_park.contract.parkable import device_of
from pytest_park.contract.probes import batch, plain
from pytest_park.fakegpu import FakeDevice

from .first_state import first_state_kept


def component(gpu: FakeDevice) -> Parkable:
    return parkable_of(plain(gpu.device, width=16).module, batch(gpu.device))


def parkable_of(module: nn.Module, inputs: Any, streamed: Sequence[str] = ()) -> Parkable:
    if streamed:
        raise NotApplicable("cpu_offload_with_hook streams no layers")
    device = device_of(module)
    with first_state_kept(module):
        _, hook = cpu_offload_with_hook(module, device)

        def restore() -> None:
            hook.hook.pre_forward(module)

        restore()

    return Parkable(
        module,
        inputs,
        park=hook.offload,
        restore=restore,
        adopt=parkable_of,
        device=device,
        finish_use=hook.offload,
        finish_request=hook.offload,
        keeps_host_copies=False,
        ends={"remove": hook.remove},
    )
