"""Pinned host memory: ordinary memory that remembers being pinned, for as long as a fake device is active."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit._builtins import _register_builtin

#: Functions of torch that make a CPU tensor and take ``pin_memory=True``, which needs a C++ allocator of the back end.
_FACTORIES = (
    "empty", "empty_strided", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "rand",
    "randn", "randint", "arange", "tensor", "linspace", "logspace", "eye", "randperm",
    "empty_permuted", "rand_like", "randn_like", "randint_like",
)  # fmt: skip

_NEW = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor")

_pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is host memory that was pinned. Looked up by storage, so views of pinned memory are pinned."""
    return bool(_pinned) and tensor.is_cpu and tensor.untyped_storage()._cdata in _pinned


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Pin the memory that *tensor* has."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    _pinned[key] = weakref.ref(storage, lambda _: _pinned.pop(key, None))
    return tensor


def forget() -> None:
    """Unpin everything."""
    _pinned.clear()


def kernels() -> torch.library.Library:
    """``is_pinned()`` and ``pin_memory()`` of CPU tensors; in force until the library is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("is_pinned", _is_pinned, "CPU")
    library.impl("_pin_memory", _pin_memory, "CPU")
    return library


def _is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    return is_pinned(tensor)


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return mark(torch.empty_like(tensor, device="cpu").copy_(tensor))


def patches() -> Iterator[tuple[Any, str, Any]]:
    for name in _FACTORIES:
        made = _pinning(getattr(torch, name))
        _register_builtin(made, f"aten::{name}")  # TorchScript knows torch's functions by identity
        yield torch, name, made
    for name in _NEW:
        yield torch.Tensor, name, _pinning(getattr(torch.Tensor, name))


def _pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            fresh = factory(*args, **{**kwargs, "pin_memory": False})
            if not fresh.is_cpu:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            return mark(fresh)
        return factory(*args, **kwargs)

    return made
