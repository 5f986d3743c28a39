"""Where the bytes of a weight live on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["HostCopy"]


@dataclass(slots=True, eq=False)
class HostCopy:
    """The host bytes of one storage group.

    Attributes:
        storage: the bytes, exactly as many as the group has on the device.
        kind: ``pageable`` memory of our own; ``pinned`` memory of our own; ``adopted``: the storage that the weight had
            on the host before it first went to the device. If that was a mapping of the checkpoint, it still is.
        fingerprint: of the device bytes that these are a copy of; None once these may have been written to.
    """

    storage: torch.UntypedStorage
    kind: Literal["pageable", "pinned", "adopted"] = "pageable"
    fingerprint: int | None = None

    @classmethod
    def empty(cls, nbytes: int, *, pinned: bool = False) -> HostCopy:
        """Fresh host memory of exactly ``nbytes``."""
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return cls(memory.untyped_storage(), "pinned" if pinned else "pageable")
