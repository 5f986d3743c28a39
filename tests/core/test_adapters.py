"""LoRA adapters of PEFT: added, merged, unmerged and deleted, between uses and while the weights are on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import ALWAYS, Denoiser, assert_same_bits, snapshot
from park_core import ParkError, layerwise_offloadable
from park_core.component import offload_of
from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import FakeDevice

peft = pytest.importorskip("peft")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


class Plain(Denoiser):
    """With a projection outside the layers that is adapted, too."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.project = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.project(self.embed(tokens) + self.position)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden) * self.scale)


CONFIG = peft.LoraConfig(r=4, target_modules=["project", "inner"], init_lora_weights=False)
PARKED = [False, True]


@pytest.fixture
def component(fake_device: FakeDevice) -> Plain:
    torch.manual_seed(0)
    component = Plain().eval().requires_grad_(False).to(fake_device.device)
    return layerwise_offloadable(component, ["blocks"], config=ALWAYS, device=fake_device.device)


def idle(component: nn.Module) -> None:
    offload = offload_of(component)
    assert offload is not None
    offload.release_layers()
    offload.parking.park()


def run(component: nn.Module, tokens: Tensor) -> Tensor:
    offload = offload_of(component)
    assert offload is not None
    offload.parking.restore()
    offload.prepare_for_next_req()
    return component(tokens).cpu()


def adapted(component: nn.Module) -> Any:
    """With an adapter, whose weights are the same every time."""
    torch.manual_seed(1)
    peft.inject_adapter_in_model(CONFIG, component)
    component.requires_grad_(False)
    return component


def lora_layers(component: nn.Module) -> list[Any]:
    return [module for module in component.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def every(verb: str) -> Callable[[nn.Module], None]:
    def call(component: nn.Module) -> None:
        for layer in lora_layers(component):
            getattr(layer, verb)()

    return call


def delete(component: nn.Module) -> None:
    for path, module in list(component.named_modules()):
        if isinstance(module, peft.tuners.lora.LoraLayer):
            component.set_submodule(path, module.get_base_layer())
    del component.peft_config


@pytest.fixture
def expected(fake_device: FakeDevice, tokens: Tensor) -> dict[str, Tensor]:
    """What a component without any offload gives, by the state of its adapter."""
    torch.manual_seed(0)
    component = Plain().eval().requires_grad_(False).to(fake_device.device)
    found = {"none": component(tokens).cpu()}
    found["added"] = adapted(component)(tokens).cpu()
    every("merge")(component)
    found["merged"] = component(tokens).cpu()
    every("unmerge")(component)
    found["unmerged"] = component(tokens).cpu()
    assert not torch.equal(found["none"], found["added"])
    return found


@pytest.mark.parametrize("parked", PARKED)
def test_adding_and_deleting_an_adapter_takes_effect(
    fake_device: FakeDevice, component: Plain, tokens: Tensor, expected: dict[str, Tensor], parked: bool
) -> None:
    for _ in range(2):
        idle(component) if parked else run(component, tokens)
        adapted(component)
        for _ in range(2):
            assert torch.equal(run(component, tokens), expected["added"])
            idle(component)
        idle(component) if parked else run(component, tokens)
        delete(component)
        for _ in range(2):
            assert torch.equal(run(component, tokens), expected["none"])
            idle(component)
    assert fake_device.requested == component.position.nbytes + tokens.nbytes


@pytest.mark.parametrize("parked", PARKED)
def test_merging_takes_effect_or_raises_and_changes_nothing(
    component: Plain, tokens: Tensor, expected: dict[str, Tensor], parked: bool
) -> None:
    adapted(component)
    for verb, after in (("merge", "merged"), ("unmerge", "unmerged")):
        run(component, tokens)
        if parked:
            idle(component)
        refused = []
        for layer in lora_layers(component):
            values = snapshot(layer)
            try:
                getattr(layer, verb)()
            except ParkError:
                refused.append(layer)
                assert_same_bits(snapshot(layer), values)
        assert refused == ([component.project] if parked else [])  # the streamed ones come on demand
        run(component, tokens)
        for layer in refused:
            if verb == "unmerge":
                layer.merged_adapters = ["default"]  # PEFT forgot it before it computed
            getattr(layer, verb)()
        for _ in range(2):
            assert torch.equal(run(component, tokens), expected[after])
            idle(component)


def test_an_adapter_is_parked_and_streamed_with_its_component(component: Plain, tokens: Tensor) -> None:
    adapted(component)
    run(component, tokens)
    idle(component)
    assert all(is_parked(weight) for weight in component.parameters())
