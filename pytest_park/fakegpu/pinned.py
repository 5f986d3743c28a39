"""Pinned host memory: ordinary memory that remembers being pinned, for as long as a fake device is active."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit._builtins import _register_builtin

from . import active, random

#: Functions of torch that make a CPU tensor and take ``pin_memory=True``, which needs a C++ allocator of the back end.
_FACTORIES = (
    "empty", "empty_strided", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "rand",
    "randn", "randint", "arange", "tensor", "linspace", "logspace", "eye", "randperm",
    "empty_permuted", "rand_like", "randn_like", "randint_like",
)  # fmt: skip

_NEW = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor")

_pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is in host memory that was pinned: by its storage, or by its address, as CUDA asks
    (``cudaPointerGetAttributes``), since another storage may lie over the same memory."""
    if not _pinned or not tensor.is_cpu:
        return False
    storage = tensor.untyped_storage()
    return storage._cdata in _pinned or _is_within_pinned(storage.data_ptr())


def _is_within_pinned(address: int) -> bool:
    owners = (ref() for ref in list(_pinned.values()))
    return any(0 <= address - owner.data_ptr() < owner.nbytes() for owner in owners if owner is not None)


def pinned_bytes() -> int:
    """Host memory that is pinned now: as much as torch's pool takes for it, which is a power of two for each request
    (``CachingHostAllocator``)."""
    owners = (ref() for ref in list(_pinned.values()))
    return sum(1 << (owner.nbytes() - 1).bit_length() for owner in owners if owner is not None and owner.nbytes())


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


@functools.cache  # TorchScript never forgets an identity, which another function must not get after this one is gone
def _pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        # somebody who put back what they had found here may have put back this function, after its time
        if not kwargs or not active.cards:
            return factory(*args, **kwargs)
        pin = kwargs.get("pin_memory")
        fresh = factory(*args, **{**kwargs, "pin_memory": False} if pin else kwargs)
        if pin and not fresh.is_cpu:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if "generator" in kwargs and fresh.is_cpu and random.is_of_a_device(kwargs["generator"]):
            raise RuntimeError("Expected a 'cpu' device type for generator but found 'fakegpu'")
        return mark(fresh) if pin else fresh

    return made
