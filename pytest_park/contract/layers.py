"""Layers whose parked weights are read in many ways: some of these torch would compute with placeholders, silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from .parkable import Parkable
from .probes import Branch, Calculation, Probe, batch, filled, linear, ramp
from .traits import Trait, never

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
    return result


def _modulated(self: Any, x: torch.Tensor) -> torch.Tensor:
    shift, scale = (self.table + 1).chunk(2)
    result: torch.Tensor = x * (1 + scale) + shift
    return result


def _masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 1, x, self.token)


def _rotated(self: Any, x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(x.shape[0], device=x.device, dtype=x.dtype), self.frequencies)
    return torch.cat([x[:, :8] * angles.cos(), x[:, 8:] * angles.sin()], -1)


def _bypassed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.child.weight, self.child.bias)


def _with_buffer(name: str, forward: Forward) -> Callable[[torch.device], nn.Module]:
    def make(device: torch.device) -> nn.Module:
        module = Calculation(forward, **{name: ramp(16, device=device)})
        module.register_buffer("matrix", ramp(16, 16, device=device))
        return module

    return make


def _own(forward: Forward, **shapes: tuple[int, ...]) -> Callable[[torch.device], nn.Module]:
    return lambda device: Calculation(forward, **{name: ramp(*shape, device=device) for name, shape in shapes.items()})


def _one(make: Callable[..., nn.Module], *arguments: Any, **options: Any) -> Callable[[torch.device], nn.Module]:
    return lambda device: filled(make(*arguments, device=device, **options))


def _attention(device: torch.device) -> nn.Module:
    layer = filled(nn.MultiheadAttention(16, 2, batch_first=True, device=device))
    return Calculation(lambda self, x: self.attention(x, x, x, need_weights=False)[0], attention=layer)


def _convolution(device: torch.device) -> nn.Module:
    layer = filled(nn.Conv1d(1, 1, 3, padding=1, device=device))
    return Calculation(lambda self, x: self.convolution(x.unsqueeze(1)).squeeze(1), convolution=layer)


def _tokens(device: torch.device) -> nn.Module:
    layer = filled(nn.Embedding(8, 16, device=device))
    return Calculation(lambda self, x: x + self.embedding((x[:, 0].abs() % 8).long()), embedding=layer)


_LAYERS: dict[str, Callable[[torch.device], nn.Module]] = {
    "Linear": lambda device: linear(16, 16, device),
    "LayerNorm": _one(nn.LayerNorm, 16),
    "GroupNorm": _one(nn.GroupNorm, 2, 16),
    "PReLU": _one(nn.PReLU),
    "Conv1d": _convolution,
    "Embedding": _tokens,
    "MultiheadAttention": _attention,
    "a hand-written RMSNorm": _own(_rms_norm, weight=(16,)),
    "a learned scale": _own(lambda self, x: x * self.scale, scale=(16,)),
    "a modulation table": _own(_modulated, table=(32,)),
    "a position table": _own(lambda self, x: x + self.positions, positions=(4, 16)),
    "a mask token": _own(_masked, token=(16,)),
    "a 0-dim gain": _own(lambda self, x: x * self.gain.exp(), gain=()),
    "RoPE frequencies": _own(_rotated, frequencies=(8,)),
    "a lone bias": _with_buffer("bias", lambda self, x: x @ self.matrix + self.bias),
    "a lone scale read as data": _with_buffer("scale", lambda self, x: (x @ self.matrix) * self.scale.data),
    "a child that is not called": lambda device: Calculation(_bypassed, child=linear(16, 16, device)),
}


def _layer(name: str, make: Callable[[torch.device], nn.Module]) -> Trait:
    return Trait(name, never, lambda device: Probe(Branch(make(device), device), batch(device)))


LAYERS = {name: _layer(name, make) for name, make in _LAYERS.items()}


def _parametrized(parkable: Parkable) -> bool:
    return any(".parametrizations." in f".{name}." for name, _ in parkable.module.named_parameters())


def _weight_norm(device: torch.device) -> Probe:
    return Probe(Branch(weight_norm(linear(16, 16, device)), device), batch(device))


PARAMETRIZED = Trait("parametrized weights", _parametrized, _weight_norm)


def _scales(device: torch.device) -> Probe:
    parts = {"scale": ramp(256, device=device), "shift": ramp(256, device=device)}
    return Probe(Calculation(lambda self, x: x * self.scale + self.shift, **parts), batch(device, 256))


#: Nothing in it checks a shape, so that placeholders of one element give a result.
SCALES = Trait("scales and shifts only", never, _scales)
