"""What a module has is looked for among the weights that are parked, not among the layers that are streamed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_park.contract import Parkable
from pytest_park.contract.odd_weights import SHAPES, VIEWS
from pytest_park.contract.probes import Weights
from pytest_park.contract.traits import SHARING, Trait
from pytest_park.fakegpu import FakeDevice

TRAITS = {
    "one element": SHAPES["one-element weights"],
    "slices": VIEWS["weights that are slices of a larger storage"],
    "over one storage": SHARING["weights over one storage"],
    "tied": SHARING["tied weights"],
}


def _component(device: torch.device) -> nn.Module:
    """Two layers as a streamer leaves them (placeholders, and views of one flat buffer), beside a plain weight."""
    flat = torch.ones(8, device=device)
    tied = nn.Parameter(torch.ones(1, device=device))
    layers = nn.ModuleList([Weights(a=flat[:4], b=flat[4:]), nn.Module(), nn.Module()])
    layers[1].weight = layers[2].weight = tied
    component = nn.Module()
    component.layers = layers
    component.weight = nn.Parameter(torch.ones(4, 4, device=device))
    return component


@pytest.mark.parametrize("trait", TRAITS.values(), ids=TRAITS.keys())
def test_a_trait_of_streamed_layers_is_none_of_the_component(trait: Trait, fake_device: FakeDevice) -> None:
    def parkable(streamed: tuple[str, ...]) -> Parkable:
        return Parkable(_component(fake_device.device), park=print, restore=print, streamed=streamed)

    assert trait.found_in(parkable(()))
    assert not trait.found_in(parkable(("layers",)))
