"""The same call on the CPU and on the fake device, and what must be equal afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "fakegpu"


def on_device(value: Any) -> Any:
    """*value* with every CPU tensor in it replaced by a device tensor of the same storage, offset and strides.

    Tensors that share a storage share one there.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    return tree_map(lambda leaf: _on_device(leaf, storages), value)


def _on_device(value: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, torch.device | str) and str(value) == "cpu":
        return torch.device(DEVICE)
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    if value.layout is not torch.strided:
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    plain = value.detach()
    host = plain.untyped_storage()
    if host._cdata not in storages:
        storages[host._cdata] = torch.empty(0, dtype=torch.uint8).set_(host).to(DEVICE).untyped_storage()
    moved = torch.empty(0, dtype=value.dtype, device=DEVICE)
    moved.set_(storages[host._cdata], value.storage_offset(), value.size(), value.stride())
    if value.is_conj():
        moved = moved.conj()
    if value.is_neg():
        moved = torch._neg_view(moved)
    return moved.requires_grad_(value.requires_grad)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


@dataclass
class Outcome:
    """What a call returned, or what it raised; and what it warned of."""

    result: Any = None
    error: Exception | None = None
    warned: tuple[str, ...] = ()


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Call with fresh random seeds, the same on host and device."""
    torch.default_generator.manual_seed(0)
    torch.fakegpu.manual_seed_all(0)  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = Outcome(result=call(*args, **kwargs))
        except Exception as error:  # whatever it is, the device must do the same
            found = Outcome(error=error)
    found.warned = tuple(str(warning.message) for warning in caught)
    return found


def same_outcome(
    call: Callable[..., Any], args: Any, kwargs: Any, *, move_all: bool = True, **how: Any
) -> tuple[Outcome, Outcome]:
    """Make *call* on the CPU and on the device; assert that results, warnings, and effects on arguments are the same.

    If the CPU raises, the device must raise the same type. Unless *move_all*, only the first argument is moved.
    """
    first, *others = args
    device_args, device_kwargs = on_device((args, kwargs)) if move_all else ((on_device(first), *others), kwargs)
    expected = outcome(call, *args, **kwargs)
    actual = outcome(call, *device_args, **device_kwargs)
    if expected.error is not None:
        assert type(actual.error) is type(expected.error), f"{actual} where the CPU raised {expected.error!r}"
        return expected, actual
    if actual.error is not None:
        raise actual.error
    assert_same(actual.result, expected.result, **how)
    assert_same(
        (device_args, device_kwargs) if move_all else device_args[:1], (args, kwargs) if move_all else args[:1], **how
    )
    assert shared(actual.result, (device_args, device_kwargs)) == shared(expected.result, (args, kwargs)), "aliases"
    surprises = set(actual.warned) - set(expected.warned)
    assert not surprises, surprises
    return expected, actual


def assert_same(
    actual: Any, expected: Any, *, values: bool = True, atol: float | None = None, rtol: float | None = None
) -> None:
    """Structure, devices, dtypes, shapes, strides, lazy conjugation and, unless they are not defined, values."""
    actual_leaves, actual_tree = tree_flatten(actual)
    expected_leaves, expected_tree = tree_flatten(expected)
    assert len(actual_leaves) == len(expected_leaves), f"{actual_tree} instead of {expected_tree}"
    for got, wanted in zip(actual_leaves, expected_leaves, strict=True):
        if not isinstance(wanted, Tensor):
            if isinstance(wanted, int | float | complex):
                assert got == wanted or (got != got and wanted != wanted), f"{got} instead of {wanted}"
            continue
        if wanted.device.type != "cpu":
            assert got.device == wanted.device
            continue
        assert got.device.type == DEVICE, f"on {got.device}"
        assert got.layout is wanted.layout
        assert got.dtype is wanted.dtype
        assert got.shape == wanted.shape
        assert got.requires_grad == wanted.requires_grad
        if wanted.layout is torch.strided:
            assert got.stride() == wanted.stride(), f"strides {got.stride()} instead of {wanted.stride()}"
            assert got.is_conj() == wanted.is_conj()
            assert got.is_neg() == wanted.is_neg()
        if values:
            torch.testing.assert_close(got.detach().cpu(), wanted.detach(), equal_nan=True, atol=atol, rtol=rtol)


def shared(result: Any, arguments: Any) -> list[int | None]:
    """For each tensor of *result* the position of the argument that it shares memory with."""
    places: dict[int, int] = {}
    for position, tensor in enumerate(tensors(arguments)):
        if tensor.layout is torch.strided and tensor.numel():
            places.setdefault(tensor.untyped_storage()._cdata, position)
    return [
        places.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided and tensor.numel() else None
        for tensor in tensors(result)
    ]
