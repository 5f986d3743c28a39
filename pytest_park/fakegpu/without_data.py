"""Devices without data, for cards far larger than the host: shapes, dtypes and bytes are right, values do not exist.

Kernels run on meta tensors. Device memory is address space that is never touched, so the host needs none for it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _tensor_str

from . import active
from .tensors import as_lazy_as, host_view

#: Linux's ``MAP_NORESERVE``: address space beyond what the host has is fine, because no page of it is ever written.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """What a borrowed kernel sees of the device tensor *tensor*: its memory, or its shape where there is no data."""
    if active.has_data():
        return host_view(tensor)
    view = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return as_lazy_as(tensor, view)


def unwritten(shape: torch.Tensor) -> torch.Tensor:
    """A CPU tensor like the meta tensor *shape* over address space that nobody has written to."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape.size(), shape.stride(), strict=True))
    nbytes = extent * shape.element_size() if shape.numel() else 0
    if not nbytes:
        return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cpu")
    space = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    flat = torch.frombuffer(space, dtype=torch.uint8, count=nbytes)
    return torch.empty(0, dtype=shape.dtype, device="cpu").set_(flat.untyped_storage(), 0, shape.size(), shape.stride())


def refuse_values(what: str) -> None:
    """Raise, because *what* needs values."""
    raise NotImplementedError(
        f"{what} needs the values of a tensor, and this fake device has none: it was activated with data=False"
    )


def patches() -> Iterator[tuple[Any, str, Any]]:
    """Where torch itself looks at values by way of a copy, of which nobody can tell what it is for."""
    yield torch.Tensor, "tolist", _tolist
    yield _tensor_str, "_str_intern", _str


_native_tolist: Callable[[torch.Tensor], Any] = torch.Tensor.tolist
_native_str: Callable[..., str] = _tensor_str._str_intern


def _tolist(self: torch.Tensor) -> Any:
    if self.device.type == "fakegpu" and not active.has_data():
        refuse_values("tolist()")
    return _native_tolist(self)


def _str(tensor: torch.Tensor, **options: Any) -> str:
    """``repr``: as torch shows meta tensors."""
    if tensor.device.type == "fakegpu" and not active.has_data():
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)})"
    return _native_str(tensor, **options)
