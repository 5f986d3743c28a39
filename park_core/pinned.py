"""Pinned host memory for layers: within a budget, and hardly more than the layers have.

torch's pool of pinned memory rounds each request up to a power of two (pytorch issue 95823): a weight of 135 MiB would
take 256 MiB. So the weights are cut out of arenas whose size is a power of two in the first place. The blocks of Wan
14B take 1.9% more than they have, those of Flux 1.6%, of T5-XXL nothing; a lone weight, or a few of one size, more.
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
    pageable = 0
    while waiting:
        size, first = _arena(waiting, budget.left)
        if not first:
            pageable += waiting.pop(0).nbytes
            continue
        try:
            arena = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as failure:
            logger.warning("%s: the system pins no %s: %s", component, format_size(size), failure)
            break
        budget.left -= size
        _fill(arena, first)
        waiting = [group for group in waiting if group not in first]
    if pageable := pageable + sum(group.nbytes for group in waiting):
        logger.warning(
            "%s: %s of layers stay in pageable memory, the others are pinned", component, format_size(pageable)
        )


def _arena(waiting: list[StorageGroup], left: int) -> tuple[int, dict[StorageGroup, int]]:
    """The size of the arena that is filled best, and where in it the groups are that fill it."""
    best: tuple[int, dict[StorageGroup, int]] = (1, {})
    size = 1 << (waiting[0].nbytes - 1).bit_length()
    while size <= left:
        places, end = {}, 0
        for group in waiting:
            if end + group.nbytes <= size:
                places[group] = end
                end += -(-group.nbytes // _ALIGNMENT) * _ALIGNMENT
        if sum(group.nbytes for group in places) / size >= sum(group.nbytes for group in best[1]) / best[0]:
            best = size, places
        if len(places) == len(waiting) or size >= _LARGEST_ARENA:
            break
        size *= 2
    return best


def _fill(arena: torch.Tensor, places: dict[StorageGroup, int]) -> None:
    for group, start in places.items():
        assert group.host is not None
        part = arena[start : start + group.nbytes]
        piece = from_dlpack(part)  # with a storage of its own, which keeps the arena alive
        piece.copy_(bytes_of(group.host.storage))
        group.host = HostCopy(piece.untyped_storage(), "pinned")
