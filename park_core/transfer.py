"""Moving the bytes of storage groups between host and device.

The host copies are pageable, and a driver moves pageable memory slowly: through one small buffer of its own, one piece
at a time. :class:`Staging` does the same with a ring of pinned buffers, so that the host fills one while the device
empties another. The buffers are few and given back; the host copies stay pageable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from park_core.host_copy import HostCopy
from park_core.storage import StorageGroup, bytes_of

__all__ = ["Staging", "Transfer", "backend_of", "synchronize", "transfer", "worth_staging"]

_BUFFERS, _BUFFER_BYTES = 4, 8 * 1024**2
_WORTH_STAGING = 2 * _BUFFER_BYTES  # below that there is nothing to overlap


def backend_of(device: torch.device) -> Any:
    """The module that speaks for a device type: ``torch.cuda``, ``torch.xpu``, ... All that we know of a backend."""
    return torch.get_device_module(device.type)


def synchronize(device: torch.device) -> None:
    """Wait for all streams of a device."""
    backend_of(device).synchronize(*(() if device.type == "mps" else (device,)))  # torch.mps knows one device only


class Transfer:
    """The plain way: one blocking copy per group."""

    @torch.no_grad()  # the source may be the weight itself: the copy must not keep a graph of it alive
    def to_host(self, group: StorageGroup, storage: torch.UntypedStorage, into: HostCopy | None = None) -> HostCopy:
        """A host copy of a resident group, exactly as large as the storage; a new one is pageable. Blocks until then.

        Args:
            into: an outdated host copy, whose memory is used again if it is ours and nobody else sees it.
        """
        source = group.memory(storage)
        if into is None or into.kind == "adopted" or into.viewed_elsewhere:
            into = HostCopy.like(source)
        if into.memory is None or into.memory.shape != source.shape or into.memory.dtype != source.dtype:
            self._down(bytes_of(into.storage), bytes_of(storage))
        else:
            self._down(into.memory, source)
        return into

    def to_device(self, group: StorageGroup) -> Tensor:
        """New device memory with the bytes of the group's host copy. Blocks until they are there."""
        whole = group.whole
        if whole is None or whole.inference != torch.is_inference_mode_enabled():
            memory = torch.empty(group.nbytes, dtype=torch.uint8, device=group.device)
        else:
            memory = torch.empty(whole.shape, dtype=whole.dtype, device=group.device)
        self.fill(memory, group)
        return memory

    def fill(self, memory: Tensor, group: StorageGroup) -> None:
        """Copy the group's host copy into contiguous device memory. Blocks until it is there.

        Raises:
            StaleMappingError: the host copy is the mapping of a file that changed.
        """
        host = group.host
        assert host is not None
        host.check(group.name)
        if host.memory is None or host.memory.shape != memory.shape or host.memory.dtype != memory.dtype:
            self._up(bytes_of(memory.untyped_storage()), bytes_of(host.storage))
        else:
            self._up(memory, host.memory)

    # Both tensors are contiguous and have the same dtype and shape.

    def _down(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def _up(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class Staging(Transfer):
    """Through pinned buffers, on a copy stream. Small groups still go the plain way.

    The host fills and empties the buffers with all of torch's threads: ``copy_`` splits what has more than 32,768
    elements (``at::internal::GRAIN_SIZE``).
    """

    def __init__(self, device: torch.device) -> None:
        backend = backend_of(device)
        self._backend, self._device = backend, device
        self._stream = backend.Stream(device=device)
        self._slots = cycle([_Slot(backend.Event()) for _ in range(_BUFFERS)])

    def _up(self, target: Tensor, source: Tensor) -> None:
        if not worth_staging(source.nbytes):
            return super()._up(target, source)
        with self._on_copy_stream():
            for part, piece in _pieces(target, source):
                slot = next(self._slots)
                slot.event.synchronize()  # until the device has emptied the buffer
                buffer = slot.buffer[: piece.numel()].copy_(piece)
                part.copy_(buffer, non_blocking=True)
                slot.event.record(self._stream)

    def _down(self, target: Tensor, source: Tensor) -> None:
        if not worth_staging(source.nbytes) or not _has_values(source):
            return super()._down(target, source)
        filling: list[tuple[_Slot, Tensor]] = []
        with self._on_copy_stream():
            for part, piece in _pieces(target, source):
                if len(filling) == _BUFFERS:
                    _empty(*filling.pop(0))
                slot = next(self._slots)
                slot.buffer[: piece.numel()].copy_(piece, non_blocking=True)
                slot.event.record(self._stream)
                filling.append((slot, part))
            for slot, part in filling:
                _empty(slot, part)

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """Ordered after what the current stream has now; finished on the way out, also after a failure."""
        self._stream.wait_stream(self._backend.current_stream(self._device))
        try:
            with self._backend.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()


class _Slot:
    """A pinned buffer, and the event after which it may be used again."""

    def __init__(self, event: Any) -> None:
        self.buffer, self.event = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True), event


def _has_values(tensor: Tensor) -> bool:
    """A fake device may have no data. Then there is nothing to fill the pages of a host copy with."""
    try:
        bytes_of(tensor.untyped_storage())[0].item()
    except NotImplementedError:
        return False
    return True


def _empty(slot: _Slot, part: Tensor) -> None:
    slot.event.synchronize()
    part.copy_(slot.buffer[: part.numel()])


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    target, source = bytes_of(target.untyped_storage()), bytes_of(source.untyped_storage())
    for start in range(0, target.numel(), _BUFFER_BYTES):
        yield target[start : start + _BUFFER_BYTES], source[start : start + _BUFFER_BYTES]


def worth_staging(nbytes: int) -> bool:
    """Is there enough to overlap?"""
    return nbytes >= _WORTH_STAGING


def transfer(device: torch.device, nbytes: int, *, staged: bool = True) -> Transfer:
    """The way to move ``nbytes``: staged where that pays and the backend can pin memory, else plain."""
    backend = backend_of(device)
    if staged and worth_staging(nbytes) and hasattr(backend, "Stream") and device.type != "mps":
        try:
            return Staging(device)
        except RuntimeError:  # no pinned memory to be had
            pass
    return Transfer()
