"""Hypothesis strategies for modules to park: trees of layers with ties, views, odd dtypes, parametrizations, buffers.

What is drawn is a `Tree`, a description that hypothesis can print and shrink. `Tree.build` makes a new module of it at
each call, equal to the last one, so that it also serves as a parkable factory::

    @given(tree=trees())
    def test_my_parking(tree):
        with activate(memory="64 MiB") as gpu:
            findings = check(lambda: my_parkable(tree.build(gpu.device), tree.inputs(gpu.device)))
            assert not findings

Needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from .probes import Weights, batch, filled, linear, ramp

__all__ = ["DTYPES", "LAYERS", "VIEWS", "Leaf", "Node", "Odd", "Tree", "leaves", "odd_weights", "trees"]

WIDTH = 8

#: Dtypes of odd weights.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int64,
)

#: Layers by name: each takes and gives [4, 8].
LAYERS: dict[str, Callable[[torch.device], nn.Module]] = {
    "linear": lambda device: linear(WIDTH, WIDTH, device),
    "linear without bias": lambda device: linear(WIDTH, WIDTH, device, bias=False),
    "layer norm": lambda device: filled(nn.LayerNorm(WIDTH, device=device)),
    "batch norm": lambda device: filled(nn.BatchNorm1d(WIDTH, device=device)),
    "prelu": lambda device: filled(nn.PReLU(device=device)),
    "weight norm": lambda device: weight_norm(linear(WIDTH, WIDTH, device)).eval(),
    "spectral norm": lambda device: _spectral(device),
}

#: How an odd weight lies in its storage, made from a flat tensor of 48 elements.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda flat: flat.view(6, 8),
    "slice": lambda flat: flat[8:24],
    "transposed": lambda flat: flat.view(6, 8).t(),
    "padded": lambda flat: flat.view(6, 8)[:, :5],
    "expanded": lambda flat: flat[:6].view(6, 1).expand(6, 100),
    "overlapping": lambda flat: flat.as_strided((12, 12), (3, 1)),
    "channels_last": lambda flat: flat.view(2, 2, 3, 4).permute(0, 3, 1, 2),
    "no dimension": lambda flat: flat[1],
    "one element": lambda flat: flat[1:2],
    "empty": lambda flat: flat[:0],
}


@dataclass(frozen=True, slots=True)
class Odd:
    """A weight over a storage that may be another odd weight's, too: *storage* numbers them within the tree."""

    view: str
    dtype: torch.dtype
    storage: int
    is_buffer: bool = False


@dataclass(frozen=True, slots=True)
class Leaf:
    """A layer of `LAYERS`; of those with the same *tie* all have the parameters of the first one of that kind."""

    kind: str
    tie: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """Parts one after the other, and odd weights and buffers of its own that the forward reads."""

    parts: tuple[Leaf | Node, ...]
    odd: tuple[Odd, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """A module as a description; *streamed* says that its list of ``layers`` is to be streamed."""

    root: Node
    layers: tuple[Leaf | Node, ...] = ()

    def build(self, device: torch.device) -> nn.Module:
        """A new module on the device, the same at each call, in evaluation mode."""
        builder = _Builder(device)
        module = builder.node(self.root)
        if self.layers:
            module.layers = nn.ModuleList(builder.part(layer) for layer in self.layers)
        return module.eval()

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Arguments for the forward of the module."""
        return (batch(device, WIDTH),)

    @property
    def streamed(self) -> tuple[str, ...]:
        """Names of the lists whose layers may be streamed."""
        return ("layers",) if self.layers else ()


class Branching(nn.Module):
    """What a `Node` becomes."""

    def __init__(self, parts: list[nn.Module], odd: Weights) -> None:
        super().__init__()
        self.odd = odd
        self.parts = nn.ModuleList(parts)
        self.layers: Any = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Bounded after each part, so that no depth makes numbers that are equal because they are all infinite.
        x = torch.tanh(x + torch.tanh(self.odd(x)))
        for buffer in self.odd.buffers():
            x = x + torch.tanh(_number(buffer))
        for part in (*self.parts, *self.layers):
            x = torch.tanh(part(x))
        return x


class _Builder:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tied: dict[tuple[str, int], nn.Module] = {}
        self.storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def node(self, node: Node) -> Branching:
        weights = {f"odd_{i}": self.tensor(odd) for i, odd in enumerate(node.odd) if not odd.is_buffer}
        module = Weights(**weights)
        for i, odd in enumerate(node.odd):
            if odd.is_buffer:
                module.register_buffer(f"odd_{i}", self.tensor(odd))
        return Branching([self.part(part) for part in node.parts], module)

    def part(self, part: Leaf | Node) -> nn.Module:
        if isinstance(part, Node):
            return self.node(part)
        layer = LAYERS[part.kind](self.device)
        if part.tie is not None:
            first = self.tied.setdefault((part.kind, part.tie), layer)
            if first is not layer:
                for name, parameter in first.named_parameters():
                    owner, _, leaf = name.rpartition(".")
                    layer.get_submodule(owner).register_parameter(leaf, parameter)
        return layer

    def tensor(self, odd: Odd) -> torch.Tensor:
        key = odd.storage, odd.dtype
        if key not in self.storages:
            values = ramp(48, device=torch.device("cpu")).mul(8)
            self.storages[key] = (values > 3 if odd.dtype is torch.bool else values.to(odd.dtype)).to(self.device)
        return VIEWS[odd.view](self.storages[key])


def _spectral(device: torch.device) -> nn.Module:
    layer = spectral_norm(linear(WIDTH, WIDTH, torch.device("cpu")))
    with torch.no_grad():
        for vector in layer.buffers():  # random ones
            vector.copy_(nn.functional.normalize(ramp(*vector.shape, device=torch.device("cpu")), dim=0))
    return layer.to(device).eval()


def _number(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.abs() if tensor.dtype.is_complex else tensor
    return values.to(torch.float32).reshape(-1).cumsum(0).sum()


def odd_weights() -> st.SearchStrategy[Odd]:
    """Odd weights and buffers over few storages, so that some share one."""
    return st.builds(
        Odd,
        view=st.sampled_from(list(VIEWS)),
        dtype=st.sampled_from(DTYPES),
        storage=st.integers(0, 2),
        is_buffer=st.sampled_from([False, False, True]),
    )


def leaves() -> st.SearchStrategy[Leaf]:
    """Layers, some of them tied."""
    return st.builds(Leaf, st.sampled_from(list(LAYERS)), st.sampled_from([None, None, 0]))


def trees(*, max_leaves: int = 6, streamed: bool = True) -> st.SearchStrategy[Tree]:
    """Modules of about *max_leaves* layers, with lists to be streamed if *streamed*; each has something to park."""
    odd = st.lists(odd_weights(), max_size=4).map(tuple)
    parts = st.recursive(
        leaves(), lambda inner: st.builds(Node, st.lists(inner, max_size=3).map(tuple), odd), max_leaves=max_leaves
    )
    roots = st.builds(lambda some, odd: Node((Leaf("linear"), *some), odd), st.lists(parts, max_size=3), odd)
    layers = st.lists(leaves(), max_size=3) if streamed else st.just([])
    return st.builds(Tree, roots, layers.map(tuple))
