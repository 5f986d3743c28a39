"""Storage groups: all tensors over one storage, which move as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from park_core.host_copy import HostCopy

__all__ = ["GroupState", "StorageGroup", "View", "bytes_of", "group_of", "settle", "unsettle"]


# What all back ends copy bit for bit as it is. Anything rarer is copied as bytes.
_COPIED_AS_THEY_ARE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
}


class GroupState(Enum):
    """Where the bytes of a storage group are.

    RESIDENT: on the device. A host copy may exist too, kept to save the next transfer.
    PARKED: in the host copy only; the tensors show a placeholder and hold no device memory.
    """

    RESIDENT = "resident"
    PARKED = "parked"


@dataclass(slots=True, eq=False)  # not frozen, which would double the time it takes to make ten thousand of them
class View:
    """How one tensor looks at the bytes of its group; enough to make it again, exactly. Never changed.

    ``inner``: the tensor is inside a wrapper.
    """

    ref: weakref.ref[Tensor]
    name: str
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    inference: bool
    contiguous: bool
    inner: bool = False

    @classmethod
    def of(cls, tensor: Tensor, name: str, inner: bool = False) -> View:
        return cls(
            weakref.ref(tensor),
            name,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_inference(),
            tensor.is_contiguous(),
            inner,
        )

    def is_still(self, tensor: Tensor, name: str) -> bool:
        """Is this what :meth:`of` would say of ``tensor`` now?"""
        return (
            self.ref() is tensor
            and self.name == name
            and self.dtype == tensor.dtype
            and self.shape == tensor.shape
            and self.stride == tensor.stride()
            and self.offset == tensor.storage_offset()
            and self.inference == tensor.is_inference()
        )

    def describes(self, memory: Tensor) -> bool:
        """Is this view all of ``memory``, a contiguous tensor over a storage of its own?"""
        return memory.dtype == self.dtype and memory.shape == self.shape and memory.is_inference() == self.inference

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view of other bytes. An inference tensor stays one, a normal one stays normal."""
        with torch.inference_mode(self.inference):
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(slots=True, weakref_slot=True, eq=False)
class StorageGroup:
    """All known tensors over one storage: ties, aliases, slices, expanded views, buffers that share with a weight.

    A group lives exactly as long as it is of use: a resident group belongs to its storage, a parked one to its tensors.
    So a host copy goes away with the weight that it belongs to, also when that weight is deleted while parked.
    """

    component: str
    device: torch.device
    nbytes: int
    state: GroupState = GroupState.RESIDENT
    views: list[View] = field(default_factory=list)
    host: HostCopy | None = None
    address: int = 0  # on the device, when it was parked; 0 if it came from the host
    streamed: bool = False  # belongs to a LayerwiseOffloadManager, not to parking
    exposed: bool = False  # somebody was given the host copy, to read or to write, since the last transfer began
    load: Callable[[], None] | None = None  # brings the layer of a streamed group to the device
    moved: bool = False  # the user moved it to the host, where it stays
    holders: set[weakref.ref[Any]] = field(default_factory=set)  # the Parkings that want it resident

    def tensors(self) -> Iterator[tuple[View, Tensor]]:
        """The members that are still alive."""
        for view in self.views:
            if (tensor := view.ref()) is not None:
                yield view, tensor

    @property
    def whole(self) -> View | None:
        """The only member, if it is all the bytes in order, as most weights are: it can be copied without a detour."""
        view = self.views[0] if len(self.views) == 1 else None
        if view is None or view.offset or not view.contiguous or view.dtype not in _COPIED_AS_THEY_ARE:
            return None
        return view if view.shape.numel() * view.dtype.itemsize == self.nbytes else None

    def memory(self, storage: torch.UntypedStorage) -> Tensor:
        """All the bytes that the group is resident in, as one tensor: its only member if that will do."""
        whole = self.whole
        member = None if whole is None else whole.ref()
        return member if type(member) in (nn.Parameter, Tensor) else bytes_of(storage)  # type: ignore[return-value]

    @property
    def name(self) -> str:
        """The names of its members, for people."""
        return " = ".join(dict.fromkeys(view.name for view in self.views if view.name))


def group_of(storage: torch.UntypedStorage) -> StorageGroup | None:
    """The group that is resident in ``storage``, if it is known."""
    return getattr(storage, "_park_group", None)


def settle(group: StorageGroup, storage: torch.UntypedStorage) -> None:
    """Record that ``group`` is resident in ``storage``.

    Torch keeps the storage's Python object as long as the storage, so the record goes away with the memory.
    """
    storage._park_group = group  # type: ignore[attr-defined]


def unsettle(storage: torch.UntypedStorage) -> None:
    """Forget the group of ``storage``, which holds it from now on and would keep its own entry alive."""
    if group_of(storage) is not None:
        del storage._park_group  # type: ignore[attr-defined]


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The bytes of a storage as a 1-dim uint8 tensor over it."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
