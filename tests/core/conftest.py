"""Components small enough to look at, with everything that parking has to deal with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from park_core import LayerwiseOffloadableModuleMixin, OffloadConfig
from pytest_park.fakegpu import FakeDevice


class Denoiser(nn.Module, LayerwiseOffloadableModuleMixin):
    """Embedding, streamed blocks, norm and a head tied to the embedding, a position table as buffer."""

    layer_names = ("blocks",)

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("position", torch.randn(width))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden) * self.scale)


MEMORY = OffloadConfig(performance_mode="memory")
ALWAYS = OffloadConfig(parking="always")


@pytest.fixture
def denoiser(fake_device: FakeDevice) -> Denoiser:
    """On the fake device, under layerwise offload, in performance mode ``memory``."""
    torch.manual_seed(0)
    component = Denoiser().eval().requires_grad_(False)
    component.configure_layerwise_offload(MEMORY, device=fake_device.device, component_name="denoiser")
    return component


@pytest.fixture
def tokens(fake_device: FakeDevice) -> Tensor:
    return torch.arange(12, device=fake_device.device)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Every value, on the host, sharing nothing."""
    return {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}


def bits(tensor: Tensor) -> Tensor:
    """The values, byte by byte, on the host; NaN equals itself here."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(bits(actual[name]), bits(tensor)), name


def non_layer_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in module.named_parameters() if not name.startswith("blocks.")}


@pytest.fixture
def crowded(headroom: Callable[[int], int]) -> Callable[[], None]:
    """Make the headroom so small that any weight is significant."""
    return lambda: headroom(1024) and None
