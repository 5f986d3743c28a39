"""The whole test suite of the shelf: what it is, how it is called, and what is known to be wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from examples.own_parkable import shelf as shelf_module
from examples.own_parkable.shelf import Shelf
from examples.own_parkable.voice import Voice
from pytest_park.contract import NotApplicable, Parkable, ParkableContract


def on_a_shelf(module: nn.Module, inputs: Any, streamed: Sequence[str] = ()) -> Parkable:
    if streamed:
        raise NotApplicable("this project streams no layers")
    device = next(parameter.device for parameter in module.parameters() if parameter.device.type != "cpu")
    shelf = Shelf(module, device)
    return Parkable(
        module,
        inputs,
        park=shelf.park,
        restore=shelf.restore,
        park_for=shelf.park,
        adopt=on_a_shelf,
        significance=shelf.share,
        weight_bytes=shelf.size,
        keeps_host_copies=False,
        ends={"close": shelf.close},
    )


@pytest.mark.fake_device(count=2)
class TestShelf(ParkableContract):
    known_broken: ClassVar[dict[str, str]] = {
        "c04_what_shared_a_storage_still_shares_it[buffers": "no buffer of ours lies over a weight",
        "c26_the_process_cap": "we never set one",
        "c26_pieces": "the card is empty when we start, so there are no holes",
        "c36_": "our components share no weights",
    }

    @pytest.fixture
    def parkable(self, fake_device) -> Parkable:
        torch.manual_seed(0)
        voice = Voice().eval().to(fake_device.device)
        return on_a_shelf(voice, torch.arange(12, device=fake_device.device).reshape(2, 6))


def test_the_code_under_test_is_independent_of_this_repository() -> None:
    for source in Path(shelf_module.__file__).parent.glob("[!_]*.py"):
        text = source.read_text()
        assert "import park_core" not in text
        assert "from park_core" not in text
        assert "pytest_park" not in text
