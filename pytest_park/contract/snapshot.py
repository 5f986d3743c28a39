"""`Snapshot`: everything about a module's tensors that parking must not change, taken at one moment."""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: What can differ between two snapshots. *values* includes the shape: a placeholder is a wrong value.
ASPECTS = ("values", "dtype", "device", "layout", "storage", "sharing", "identity", "flags", "attributes")


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One parameter or buffer; *bits* are its values, *storage_bytes* all bytes of the storage under it."""

    bits: bytes
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    storage: tuple[str, int]
    identity: weakref.ref[torch.Tensor] | None
    flags: tuple[tuple[str, Any], ...]
    attributes: tuple[str, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorRecord:
        storage = tensor.untyped_storage()
        return cls(
            bits=bits_of(tensor),
            dtype=tensor.dtype,
            device=storage.device,  # a parked tensor may say where it will be
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            storage_bytes=storage.nbytes(),
            storage=(str(tensor.device), storage.data_ptr()),
            # An id could be that of a later tensor in the same place. Of buffers ``module.to`` makes new ones.
            identity=weakref.ref(tensor) if isinstance(tensor, nn.Parameter) else None,
            flags=(
                ("requires_grad", tensor.requires_grad),
                ("is_leaf", tensor.is_leaf),
                ("is_inference", tensor.is_inference()),
                ("type", type(tensor).__name__),
            ),
            attributes=tuple(sorted(vars(tensor))),
        )


class Snapshot:
    """The parameters and buffers of *module* under all their names, without those in *leave_out* (streamed layers)."""

    def __init__(self, module: nn.Module, leave_out: Collection[int] = ()) -> None:
        self.records: dict[str, TensorRecord] = {}
        for name, tensor in tensors_of(module):
            if id(tensor) in leave_out:
                continue
            for inner, part in inner_tensors(name, tensor):
                self.records[inner] = TensorRecord.of(part)

    def differences(self, now: Snapshot, aspects: Collection[str]) -> list[str]:
        """How *now* differs from this in the given `ASPECTS`: one line each, with names and numbers."""
        found: list[str] = []
        for name, then in self.records.items():
            record = now.records.get(name)
            if record is None:
                found.append(f"{name} is gone")
                continue
            found += [f"{name}: {text}" for aspect in aspects for text in _difference(aspect, then, record)]
        if "sharing" in aspects:
            found += self._sharing_differences(now)
        return found

    def _sharing_differences(self, now: Snapshot) -> list[str]:
        return [
            f"{first}: shared its storage with {', '.join(others)}, and no longer does"
            for first, *others in self.groups()
            if len({now.records[name].storage for name in (first, *others) if name in now.records}) > 1
        ]

    def groups(self) -> list[tuple[str, ...]]:
        """Names that share a storage, where more than one does."""
        by_storage: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, record in self.records.items():
            if record.storage_bytes:
                by_storage[record.storage].append(name)
        return [tuple(names) for names in by_storage.values() if len(names) > 1]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, each name of a shared one included."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def inner_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold the bytes: the tensor itself, or the inner ones of a wrapper subclass."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for attribute in flatten(tensor)[0]:
        inner = getattr(tensor, attribute)
        if isinstance(inner, torch.Tensor):  # a DTensor lists its mesh, too
            yield from inner_tensors(f"{name}.{attribute}", inner)


def bits_of(tensor: torch.Tensor) -> bytes:
    """The values of a tensor as bytes, in the order of its elements: NaN payloads and signs of zero count."""
    host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def _difference(aspect: str, then: TensorRecord, now: TensorRecord) -> Iterator[str]:
    if aspect == "values":
        if then.shape != now.shape:
            yield f"shape {list(then.shape)} became {list(now.shape)}"
        elif then.dtype == now.dtype and then.bits != now.bits:
            size = then.dtype.itemsize
            wrong = [i for i in range(0, len(then.bits), size) if then.bits[i : i + size] != now.bits[i : i + size]]
            yield f"{len(wrong)} of {len(then.bits) // size} values differ, the first at flat index {wrong[0] // size}"
    elif aspect == "dtype" and then.dtype != now.dtype:
        yield f"{then.dtype} became {now.dtype}"
    elif aspect == "device" and then.device != now.device:
        yield f"moved from {then.device} to {now.device}"
    elif aspect == "layout" and (then.stride, then.offset) != (now.stride, now.offset):
        yield f"stride {list(then.stride)} offset {then.offset} became {list(now.stride)} offset {now.offset}"
    elif aspect == "storage" and now.storage_bytes > then.storage_bytes:
        yield f"storage grew from {then.storage_bytes:,} to {now.storage_bytes:,} bytes"
    elif aspect == "identity" and then.identity and (not now.identity or then.identity() is not now.identity()):
        yield "is another object"
    elif aspect == "flags":
        for (flag, was), (_, is_) in zip(then.flags, now.flags, strict=True):
            if was != is_:
                yield f"{flag} {was} became {is_}"
    elif aspect == "attributes" and then.attributes != now.attributes:
        yield f"attributes {list(then.attributes)} became {list(now.attributes)}"
