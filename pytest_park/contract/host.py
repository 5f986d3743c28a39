"""What an implementation holds on the host: live CPU tensors that were not there before, by storage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HostLedger:
    """What CPU tensors and live tensors there are; checks take differences."""

    def bytes(self) -> int:
        """Host bytes under live CPU tensors, each storage once."""
        tensors = self.tensors()
        device_addresses = {_address(tensor) for tensor in tensors if tensor.device.type != "cpu"}
        found = {}
        for tensor in tensors:
            # A fake device lies in host memory: a CPU view of a device tensor is no host copy.
            if tensor.device.type == "cpu" and (address := _address(tensor)) and address not in device_addresses:
                found[address] = tensor.untyped_storage().nbytes()
        return sum(found.values())

    def count(self) -> int:
        """Live tensors on any device."""
        return len(self.tensors())

    def pinned(self) -> int:
        """Bytes of live pinned CPU tensors."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors() if t.device.type == "cpu" and t.is_pinned())

    def tensors(self) -> list[torch.Tensor]:
        gc.collect()
        return [thing for thing in gc.get_objects() if _is_plain_tensor(type(thing))]


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


def _is_plain_tensor(kind: type) -> bool:
    # Subclasses with a dispatcher of their own have no storage to ask for; what they wrap is found by itself.
    return issubclass(kind, torch.Tensor) and not hasattr(kind, "__tensor_flatten__")


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr() if tensor.device.type != "meta" else 0
