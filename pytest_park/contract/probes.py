"""Small modules that checks run on where the user's own lacks what a promise is about, and the parts they are made of.

Nothing in them is random, so that two of the same are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class Probe:
    """A module on the device, arguments for its forward, and the names of its streamed lists."""

    module: nn.Module
    inputs: Any
    streamed: tuple[str, ...] = ()


def ramp(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct small values, exact in every dtype: none is zero, none equals its neighbour."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, device="cpu") % 7 + 1).to(torch.float32).div(8).reshape(shape).to(dtype).to(device)


class Weights(nn.Module):
    """Parameters over the tensors given, as they are; the forward reads every value of each."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters(recurse=False):
            values = weight.abs() if weight.dtype.is_complex else weight
            x = x + values.to(torch.float32).reshape(-1).cumsum(0).sum()
        return x


class Calculation(nn.Module):
    """A forward given as a function of (module, x) over named parts, for layers that torch has no class for."""

    def __init__(
        self, function: Callable[[Any, torch.Tensor], torch.Tensor], **parts: torch.Tensor | nn.Module
    ) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


class Branch(nn.Module):
    """What every probe of a layer sits in: a plain layer before it and one after it."""

    def __init__(self, layer: nn.Module, device: torch.device, width: int = 16) -> None:
        super().__init__()
        self.before = linear(width, width, device)
        self.layer = layer
        self.after = nn.LayerNorm(width, device=device)

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.layer(self.before(x)))


def filled(module: nn.Module) -> nn.Module:
    """*module* with deterministic weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(ramp(*parameter.shape, device=torch.device("cpu"), dtype=parameter.dtype))
    return module.eval()


def linear(inputs: int, outputs: int, device: torch.device, bias: bool = True) -> nn.Module:
    return filled(nn.Linear(inputs, outputs, bias=bias, device=device))


def batch(device: torch.device, width: int = 16) -> torch.Tensor:
    return ramp(4, width, device=device)


def plain(device: torch.device, width: int = 64, layers: int = 2) -> Probe:
    """Linear layers and nothing special, for arithmetic with bytes."""
    return Probe(nn.Sequential(*(linear(width, width, device) for _ in range(layers))), batch(device, width))


class Stack(nn.Module):
    """Streamed blocks between non-layer weights; with *tied* one weight of a block is also the head's."""

    def __init__(self, device: torch.device, *, tied: bool = False, head_first: bool = False, width: int = 16) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block(width, device) for _ in range(3))
        head = linear(width, width, device)
        if tied:
            head.register_parameter("weight", blocks.get_parameter("1.linear.weight"))
        if head_first:
            self.head = head
            self.blocks = blocks
        else:
            self.blocks = blocks
            self.head = head
        self.embed = linear(width, width, device)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = linear(width, width, device)
        self.register_buffer("table", ramp(width, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.get_buffer("table")
        return result
