"""Traits of single weights: what dtype they have, what shape, and how they lie in their storages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .probes import Probe, Weights, batch, ramp
from .subclass import wraps_others
from .traits import Trait, any_weight, never, occupied


def _weights(name: str, test: Callable[[torch.Tensor], bool], make: Callable[[torch.device], torch.Tensor]) -> Trait:
    """Weights with one odd property, between two ordinary ones."""

    def probe(device: torch.device) -> Probe:
        ordinary = ramp(16, 16, device=device)
        return Probe(Weights(first=ordinary, odd=make(device), last=ordinary.clone()), batch(device))

    return Trait(name, any_weight(test), probe)


def _dtype(dtype: torch.dtype) -> Trait:
    """Values that no narrower dtype holds, so that a way through one is seen."""

    def make(device: torch.device) -> torch.Tensor:
        steps = torch.arange(1, 31, device="cpu").reshape(6, 5)
        if dtype is torch.bool:
            values = steps % 3 == 0
        elif dtype.is_complex:
            values = steps * (0.3 + 0.7j)
        elif dtype.is_floating_point:
            values = steps * 0.3
        else:
            values = steps * (torch.iinfo(dtype).max // 31)
        return values.to(dtype).to(device)

    def found(weight: torch.Tensor) -> bool:
        return weight.dtype is dtype and (dtype is not torch.float32 or _needs_float32(weight))

    name = str(dtype).removeprefix("torch.")
    return _weights(f"{name} weights", found, make)


def _needs_float32(weight: torch.Tensor) -> bool:
    """Whether bfloat16 would not do, as it does for ones and zeros."""
    if wraps_others(weight):
        return False
    values = weight.detach()
    return not torch.equal(values, values.bfloat16().float())


DTYPES = {
    trait.name: trait
    for trait in map(
        _dtype,
        (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.complex64,
            torch.bool,
            torch.uint8,
            torch.int64,
        ),
    )
}


def _two_empty_weights(device: torch.device) -> Probe:
    """Two, because their data has one address."""
    shapes = {"empty": (0, 3), "other": (2, 0)}
    odd = {name: torch.empty(shape, device=device) for name, shape in shapes.items()}
    return Probe(Weights(first=ramp(16, 16, device=device), **odd, last=ramp(16, 16, device=device)), batch(device))


SHAPES = {
    trait.name: trait
    for trait in (
        _weights("0-dim weights", lambda w: w.ndim == 0, lambda device: ramp(1, device=device)[0].clone()),
        _weights("one-element weights", lambda w: w.ndim > 0 and w.numel() == 1, lambda device: ramp(1, device=device)),
        Trait("empty weights", any_weight(lambda w: w.numel() == 0), _two_empty_weights),
        _weights(
            "transposed weights",
            lambda w: w.ndim == 2 and not w.is_contiguous() and w.t().is_contiguous(),
            lambda device: ramp(6, 5, device=device).t(),
        ),
        _weights(
            "channels_last weights",
            lambda w: w.ndim == 4 and not w.is_contiguous() and w.is_contiguous(memory_format=torch.channels_last),
            lambda device: ramp(2, 3, 3, 4, device=device).permute(0, 3, 1, 2),
        ),
        _weights(
            "channels_last_3d weights",
            lambda w: w.ndim == 5 and not w.is_contiguous() and w.is_contiguous(memory_format=torch.channels_last_3d),
            lambda device: ramp(2, 2, 3, 3, 4, device=device).permute(0, 4, 1, 2, 3),
        ),
    )
}


def _own_bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


VIEWS = {
    trait.name: trait
    for trait in (
        _weights(
            "weights that are slices of a larger storage",
            lambda w: w.is_contiguous() and 0 < _own_bytes(w) < occupied(w),
            lambda device: ramp(40, 5, device=device)[10:16],
        ),
        _weights(
            "weights padded in their rows",
            lambda w: w.ndim == 2 and w.stride(1) == 1 and w.stride(0) > w.size(1) > 1,
            lambda device: ramp(6, 16, device=device)[:, :5],
        ),
        _weights(
            "expanded weights",
            lambda w: any(stride == 0 and size > 1 for stride, size in zip(w.stride(), w.shape, strict=True)),
            lambda device: ramp(4, 1, device=device).expand(4, 500),
        ),
        _weights(
            "weights that overlap themselves",
            lambda w: 0 < occupied(w) < _own_bytes(w) and 0 not in w.stride(),
            lambda device: ramp(24, device=device).as_strided((6, 6), (3, 1)),
        ),
    )
}


def _one_element(position: str) -> Trait:
    def probe(device: torch.device) -> Probe:
        single, large = ramp(1, device=device), ramp(16, 16, device=device)
        # Alone they are so many that parking them leaves room for a placeholder, which needs a block of the allocator.
        weights = {
            "alone": {f"single{number}": ramp(number % 7 + 1, device=device)[-1:].clone() for number in range(256)},
            "first": {"single": single, "large": large},
            "last": {"large": large, "single": single},
            "between, with no dimension": {"large": large, "single": single[0].clone(), "other": large.clone()},
        }
        return Probe(Weights(**weights[position]), batch(device))

    return Trait(f"a weight of one element {position}", never, probe)


ONE_ELEMENT = {
    position: _one_element(position) for position in ("alone", "first", "last", "between, with no dimension")
}
