"""``torch.UntypedStorage`` on the fake device: torch makes and resizes one by a C++ allocator, which there is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import active, ledger

_native_new = torch._C.StorageBase.__new__
_native_resize = torch.UntypedStorage.resize_
_users = torch._C._storage_Use_Count
_USERS_OF_ONE_TENSOR = 2  # the tensor, and the Python object by which it is asked
_SWAP = "_swap_data_ptr_"  # not in torch's stubs


def patches() -> Iterator[tuple[Any, str, Any]]:
    yield torch.UntypedStorage, "__new__", staticmethod(_new)
    yield torch.UntypedStorage, "resize_", resize


def _new(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
    """``UntypedStorage(n, device="fakegpu")``, which crashes the process in torch's own constructor."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "fakegpu":
        return _native_new(cls, *args, **kwargs)
    if len(args) == 1 and not isinstance(args[0], int):  # bytes, one by one
        return torch.tensor(list(args[0]), dtype=torch.uint8).to(device).untyped_storage()
    return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()


def resize(self: torch.UntypedStorage, size: int) -> None:
    """``storage.resize_(n)``: as FSDP does to free the memory of a parameter and to bring it back."""
    if self.device.type != "fakegpu":
        _native_resize(self, size)
        return
    old = self.nbytes()
    if size == old:
        return
    if not hasattr(self, _SWAP):
        raise NotImplementedError(
            f"fakegpu cannot resize a storage: that takes UntypedStorage.{_SWAP}, which torch has since 2.12, and this"
            f" is torch {torch.__version__}"
        )
    other = _with_bytes_of(self, size)
    if old and size:  # torch swaps only equal sizes or an empty one: by way of the empty one
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device).untyped_storage()
        _swap(self, nothing)
    _swap(self, other)


def grown(tensor: torch.Tensor, size: int) -> torch.UntypedStorage:
    """The storage of *tensor*, grown to *size* bytes: the same one, so that views of it see the growth.

    Where torch cannot do that (see `resize`) and no other tensor has the storage, it is a new one with the same bytes.
    """
    storage = tensor.untyped_storage()
    if not hasattr(storage, _SWAP) and _users(storage._cdata) <= _USERS_OF_ONE_TENSOR:
        return _with_bytes_of(storage, size)
    resize(storage, size)
    return storage


def _with_bytes_of(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    with torch.no_grad():
        fresh = torch.empty(size, dtype=torch.uint8, device=storage.device)
        kept = min(storage.nbytes(), size)
        if kept:
            fresh[:kept].copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:kept])
    return fresh.untyped_storage()


def _swap(left: torch.UntypedStorage, right: torch.UntypedStorage) -> None:
    getattr(left, _SWAP)(right)
    ledger.swap(active.card(left.device.index), left, right)
