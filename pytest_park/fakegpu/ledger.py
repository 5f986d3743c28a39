"""Which storages live on which device: every device tensor is entered here once, and leaves when torch frees its bytes.

torch keeps the Python object of a storage as long as the storage itself lives, so the callback of a weak reference to
it fires exactly when the memory is freed: after the last view, ``.data`` swap, autograd node and pending exception.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from . import active
from .blocks import Block
from .tensors import device_view
from .without_data import unwritten

if TYPE_CHECKING:
    from .device import FakeDevice
    from .sanitizer import History

_make_unreadable = torch._C._set_throw_on_mutable_data_ptr


class Entry(weakref.ref[torch.UntypedStorage]):
    """A live storage and the block that it occupies."""

    __slots__ = ("block", "born", "card", "history", "key")
    block: Block
    born: int
    card: FakeDevice
    history: History | None
    key: int


def adopt(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """*tensor* (fresh CPU memory that nothing else refers to) as a tensor of device *index*, its bytes allocated there.

    A meta tensor gets memory that holds no data. Raises ``torch.OutOfMemoryError`` when the device has no room; the CPU
    memory is then freed with *tensor*.
    """
    if tensor.is_meta:
        tensor = unwritten(tensor)
    adopted = device_view(tensor, index)
    storage = adopted.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes:
        card = active.card(index)
        _enter(storage, card.allocate(nbytes), card)
    return adopted


def _enter(storage: torch.UntypedStorage, block: Block, card: FakeDevice) -> None:
    entry = Entry(storage, _left)
    entry.block = block
    entry.card = card
    entry.history = None
    entry.born = card.allocator.allocations
    entry.key = key = storage._cdata
    card.entries[key] = entry


def _left(entry: Entry) -> None:
    card = entry.card
    del card.entries[entry.key]
    if entry.history is not None:
        card.sanitizer.freed(entry.block, entry.history)
    card.allocator.free(entry.block)


def swap(card: FakeDevice, left: torch.UntypedStorage, right: torch.UntypedStorage) -> None:
    """The two storages have exchanged their memory: so do their blocks."""
    entries = [(storage, card.entries.pop(storage._cdata, None)) for storage in (left, right)]
    for (storage, _), (_, entry) in zip(entries, reversed(entries), strict=True):
        if entry is not None:
            _enter(storage, entry.block, card)


def expire(storage: torch.UntypedStorage) -> None:
    """The device of *storage* is gone: from now on every look at its bytes raises ``RuntimeError``."""
    over_it = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    _make_unreadable(over_it)
