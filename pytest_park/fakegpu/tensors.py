"""Device tensors are real torch tensors over CPU memory: one function turns either kind into the other.

A tensor is exported as a DLPack capsule, the device in the capsule is overwritten, and the capsule is imported again.
No bytes move; sizes, strides and dtype survive; the imported tensor keeps the exported one alive, so lifetimes are
torch's own. The capsule holds a ``DLManagedTensor`` whose first member is the ``DLTensor``: ``data`` (8 bytes), then
``device`` as two 32-bit integers, type and index (``dlpack.h``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch

_HOST = 1  # kDLCPU
_EXTERNAL = 12  # kDLExtDev, which torch reads as PrivateUse1
_DEVICE_OFFSET = 8

_export = torch._C._to_dlpack
_import = torch._C._from_dlpack
#: Whether two tensors have one storage; what torch's stubs lack.
share_memory: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
_word = ctypes.c_int64.from_address
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_NAME = b"dltensor"

if sys.byteorder != "little":  # the two integers are written as one
    raise RuntimeError("fakegpu writes DLPack capsules and knows how only on little-endian machines")


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of the device tensor *tensor*: same bytes, layout, dtype, and whether it is lazily
    conjugated or negated.

    For torch's kernels only: whoever holds it reads and writes "device memory" from the host.
    """
    return _moved(tensor, _HOST)


def device_view(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A device tensor over the memory of the CPU tensor *tensor*, on device *index*. No bytes are counted."""
    return _moved(tensor, _EXTERNAL | index << 32)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of *tensor*, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def host_part(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`host_view` of *tensor* as a part of *memory*, which is the `host_view` of all the bytes of its storage.

    Two parts of one memory are so for torch too; two views by themselves are not, wherever they lie.
    """
    part = torch.empty(0, dtype=tensor.dtype, device="cpu")
    part.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return as_lazy_as(tensor, part)


def as_lazy_as(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """*view*, which torch conjugates and negates when it is read if it does so with *tensor*."""
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def _moved(tensor: torch.Tensor, word: int) -> torch.Tensor:
    try:
        capsule = _export(tensor)
    except (RuntimeError, BufferError):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else tensor.layout
            raise NotImplementedError(f"fakegpu has no {kind} tensors") from None
        return _reinterpreted(tensor, word)
    _word(_address(capsule, _NAME) + _DEVICE_OFFSET).value = word
    view = _import(capsule)
    dtype = tensor.dtype
    if view.dtype is not dtype:
        return _reinterpreted(tensor, word)
    return as_lazy_as(tensor, view) if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()) else view


def _reinterpreted(tensor: torch.Tensor, word: int) -> torch.Tensor:
    """The same for dtypes that DLPack cannot name: the storage travels as bytes and gets its dtype back."""
    flat = bytes_of(tensor)
    try:
        capsule = _export(flat)
    except RuntimeError as error:
        raise RuntimeError(
            f"the bytes of this tensor on {tensor.device} cannot be read: the fake device that it lived on is no longer"
            f" active ({str(error).splitlines()[0]})"
        ) from None
    _word(_address(capsule, _NAME) + _DEVICE_OFFSET).value = word
    moved = _import(capsule)
    return as_lazy_as(
        tensor, moved.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    )
