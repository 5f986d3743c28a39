"""Tensors that wrap others, as DTensor and the quantised weights of torchao do: their bytes are in what they wrap.

A wrapper stays as it is while its weight is parked: what is parked are its *inner tensors*. They refuse to compute, so
whatever the wrapper makes of an operation, it ends there. What a wrapper wraps it tells by ``__tensor_flatten__``,
torch's protocol for such classes (``torch.utils._python_dispatch.is_traceable_wrapper_subclass``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from park_core.errors import ParkError

__all__ = ["follow_inner_tensors", "inner_tensors", "size_of", "swap_contents", "wraps_others"]


def inner_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold the bytes, each with its name below ``name``; ``tensor`` itself if it is no wrapper.

    A wrapper that does not tell, or makes its inner tensors anew each time that it is asked, comes as it is.
    """
    held = _held_by(tensor)
    if not held:
        yield name, tensor
    for attribute, inner in held.items():
        yield from inner_tensors(f"{name}.{attribute}", inner)


def wraps_others(tensor: Tensor) -> bool:
    """Does its class take operations into its own hands, so that its storage is a mere promise?"""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def size_of(tensor: Tensor) -> int:
    """Bytes that it takes; of a tensor that wraps others, what those take: its own shape and dtype are a promise."""
    inner = list(_held_by(tensor).values())
    if not inner and wraps_others(tensor):
        inner = [value for value in vars(tensor).values() if isinstance(value, Tensor)]
    if inner:
        return sum(map(size_of, inner))
    return 0 if nn.parameter.is_lazy(tensor) or tensor.is_meta else tensor.nbytes


def follow_inner_tensors(wrapper: Tensor) -> None:
    """Let a wrapper say that it is where its inner tensors are now: it was told its device when it was made."""
    held = _held_by(wrapper)
    for inner in held.values():
        follow_inner_tensors(inner)
    if held and (device := next(iter(held.values())).device) != wrapper.device:
        names, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(wrapper, name) for name in names}
        twin = type(wrapper).__tensor_unflatten__(parts, context, wrapper.shape, wrapper.stride())  # type: ignore[attr-defined]
        if twin.device != device:
            raise ParkError(f"a {type(wrapper).__name__} cannot be brought to {device}; move the component there first")
        swap_contents(wrapper, twin)


def swap_contents(tensor: Tensor, other: Tensor) -> None:
    """``tensor``, the same object, becomes what ``other`` is and the other way round: bytes, shape, device, dispatch.

    Other than ``tensor.data = other`` this can make a tensor with bytes one that asks its class first, and back.
    """
    if tensor.requires_grad:
        other.requires_grad_()
    with torch._C.DisableTorchFunctionSubclass():
        torch._C._swap_tensor_impl(tensor, other)


def _held_by(tensor: Tensor) -> dict[str, Tensor]:
    """What a wrapper wraps, at the first level. Not everything that it names is a tensor: a DTensor has its mesh."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {}
    try:
        names, _ = tensor.__tensor_flatten__()
    except NotImplementedError:
        return {}
    held = {name: inner for name in names if isinstance(inner := getattr(tensor, name), Tensor)}
    return held if all(getattr(tensor, name) is inner for name, inner in held.items()) else {}
