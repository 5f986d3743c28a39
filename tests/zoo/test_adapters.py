"""LoRA adapters that are added by diffusers' own call, while the weights are on the host and while they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import FakeDevice

from .test_round_trip import offloaded, output, park
from .zoo import build, inputs

peft = pytest.importorskip("peft")

LAYERS = {"FluxTransformer2DModel": "to_q", "UNet2DConditionModel": "to_q", "WanTransformer3DModel": "to_q"}


def adapted(module: nn.Module, name: str) -> Any:
    """With an adapter, whose weights are the same every time."""
    torch.manual_seed(1)
    module.add_adapter(peft.LoraConfig(r=4, target_modules=[LAYERS[name]], init_lora_weights=False))
    return module


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_an_added_adapter_takes_effect_and_is_parked(fake_device: FakeDevice, name: str, parked: bool) -> None:
    plain = build(name).to(fake_device.device)
    given = inputs(name, plain, fake_device.device)
    without, expected = output(plain, given), output(adapted(plain, name), given)
    assert without != expected
    del plain

    module = build(name).to(fake_device.device)
    offload = offloaded(module, fake_device)
    if parked:
        park(offload)
    adapted(module, name)
    for _ in range(2):
        offload.parking.restore()
        offload.prepare_for_next_req()
        assert output(module, given) == expected
        park(offload)
        assert all(is_parked(weight) for weight in module.parameters())
