"""What an implementation holds on the host: live CPU tensors that were not there before, by storage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .subclass import wraps_others


class HostLedger:
    """What CPU storages and live tensors there are; checks take differences. All sizes are bytes."""

    def bytes(self) -> int:
        """Host bytes under live CPU tensors and storages, each storage once."""
        return sum(self._host_storages().values())

    def pinned(self) -> int:
        """Those of them that are page-locked."""
        gc.collect()
        sizes = {s.data_ptr(): s.nbytes() for s in _storages() if s.device.type == "cpu" and s.is_pinned()}
        return sum(sizes.values())

    def tensors(self) -> int:
        """How many tensors are alive on any device."""
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    def _host_storages(self) -> dict[int, int]:
        gc.collect()
        on_host, on_device = {}, set()
        for storage in _storages():
            if storage.device.type == "cpu":
                on_host[storage.data_ptr()] = storage.nbytes()
            else:
                on_device.add(storage.data_ptr())
        # A fake device lies in host memory: a CPU view of a device tensor is no host copy.
        return {address: size for address, size in on_host.items() if address not in on_device}


_depth = 0


@contextmanager
def swift_collector() -> Iterator[None]:
    """Make garbage collection and `HostLedger` fast within this context, by setting aside all older objects.

    Checks count live bytes, so they collect garbage often, and most of the time goes into objects of libraries that
    have nothing to do with it. ``gc.freeze`` hides those from the collector until the outermost context ends.
    """
    global _depth
    if not _depth:
        gc.collect()
        gc.freeze()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            gc.unfreeze()


def set_aside() -> None:
    """Collect what an earlier check left behind, and set aside what there is now; before a parkable is made."""
    gc.collect()
    if _depth:
        gc.freeze()


def _storages() -> list[torch.UntypedStorage]:
    """Every storage with memory that a live Python object refers to, as a storage or as a tensor over it."""
    found = []
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            kind = type(thing)
            # Subclasses with a dispatcher of their own have no storage to ask for; what they wrap is found by itself.
            if issubclass(kind, torch.Tensor) and not wraps_others(thing):
                found.append(thing.untyped_storage())
            elif kind is torch.UntypedStorage:
                found.append(thing)
    return [storage for storage in found if storage.nbytes() and _has_memory(storage)]


def _has_memory(storage: torch.UntypedStorage) -> bool:
    if storage.device.type == "meta":
        return False
    try:
        storage.data_ptr()
    except RuntimeError:  # that of a FakeTensor, which torch.compile keeps for what it has compiled
        return False
    return True
