"""Pinned host memory for layers: within a budget, and hardly more than the layers have.

torch's pool of pinned memory rounds each request up to a power of two (pytorch issue 95823): a weight of 135 MiB would
take 256 MiB. So the weights are cut out of arenas whose size is a power of two in the first place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch.utils.dlpack import from_dlpack

from park_core.host_copy import HostCopy
from park_core.memory import host_headroom
from park_core.sizes import format_size, parse_size
from park_core.storage import StorageGroup, bytes_of

__all__ = ["PinBudget", "pin"]

logger = logging.getLogger(__name__)

_LARGEST_ARENA = 1024**3  # some systems refuse to pin more in one piece (pytorch issue 152335)
_ALIGNMENT = 256


class PinBudget:
    """Bytes of host memory that one component may still pin. The kernel can never reclaim them.

    Args:
        pin_memory: see :class:`OffloadConfig`.
    """

    def __init__(self, pin_memory: bool | int | str) -> None:
        if isinstance(pin_memory, bool):
            self.left = host_headroom().bytes // 2 if pin_memory else 0
        else:
            self.left = parse_size(pin_memory)


def pin(groups: Iterable[StorageGroup], budget: PinBudget, component: str) -> None:
    """Move host copies to pinned memory, large ones first, as far as the budget reaches. The others stay pageable."""
    waiting = sorted((g for g in groups if g.host is not None and g.host.kind != "pinned"), key=lambda g: -g.nbytes)
    pageable: list[StorageGroup] = []
    while waiting:
        size = _arena_size(waiting, budget.left)
        if size < waiting[0].nbytes:
            pageable.append(waiting.pop(0))
            continue
        try:
            arena = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as failure:
            logger.warning("%s: the system pins no %s: %s", component, format_size(size), failure)
            break
        budget.left -= size
        waiting = _fill(arena, waiting)
    if pageable or waiting:
        missing = sum(group.nbytes for group in pageable + waiting)
        logger.warning(
            "%s: %s of layers stay in pageable memory, the others are pinned", component, format_size(missing)
        )


def _arena_size(waiting: list[StorageGroup], left: int) -> int:
    """The largest power of two that the groups can fill, or that holds the first of them; nothing above the budget."""
    total = sum(_aligned(group.nbytes) for group in waiting)
    largest = 1 << (waiting[0].nbytes - 1).bit_length()
    size = max(largest, min(_floor(total), _LARGEST_ARENA))
    return min(size, _floor(left))


def _fill(arena: torch.Tensor, waiting: list[StorageGroup]) -> list[StorageGroup]:
    """Move host copies into the arena, the first ones that fit. Returns the others."""
    rest, offset = [], 0
    for group in waiting:
        end = offset + group.nbytes
        if end > arena.numel():
            rest.append(group)
            continue
        assert group.host is not None
        piece = from_dlpack(arena[offset:end])  # with a storage of its own, which keeps the arena alive
        piece.copy_(bytes_of(group.host.storage))
        group.host = HostCopy(piece.untyped_storage(), "pinned")
        offset = _aligned(end)
    return rest


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _floor(nbytes: int) -> int:
    """The largest power of two that is not more."""
    return 1 << nbytes.bit_length() - 1 if nbytes else 0
