"""Where the bytes of a weight live on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from park_core.errors import StaleMappingError
from park_core.mapping import MappedFile, Mappings

__all__ = ["HostCopy"]


@dataclass(slots=True, eq=False)
class HostCopy:
    """The host bytes of one storage group.

    Attributes:
        storage: the bytes, exactly as many as the group has on the device.
        kind: ``pageable`` memory of our own; ``pinned`` memory of our own; ``adopted``: the storage that the weight had
            on the host before it first went to the device.
        fingerprint: of these bytes, taken on the device; None if it is not known, as after they were given to somebody.
        file: the checkpoint that an adopted storage is mapped from. Such a host copy costs no memory.
        memory: the bytes as a tensor like the only member of the group, if that is how they are copied.
    """

    storage: torch.UntypedStorage
    kind: Literal["pageable", "pinned", "adopted"] = "pageable"
    fingerprint: tuple[int, ...] | None = None
    file: MappedFile | None = None
    memory: Tensor | None = None

    @classmethod
    def like(cls, tensor: Tensor) -> HostCopy:
        """Fresh pageable memory for the bytes of a contiguous tensor."""
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")  # whatever the default device is
        return cls(memory.untyped_storage(), memory=None if memory.is_inference() else memory)

    @classmethod
    def adopted(cls, storage: torch.UntypedStorage, mappings: Mappings) -> HostCopy:
        """The storage itself, with the file that it is mapped from, if any."""
        return cls(storage, "adopted", file=mappings.behind(storage.data_ptr()))

    def check(self, weight: str) -> None:
        """Raise ``StaleMappingError`` if the file behind the bytes is not what it was."""
        if self.file is not None and (change := self.file.change()):
            raise StaleMappingError(
                f"weight {weight!r} is mapped from {self.file.path}, which {change} since it was loaded; "
                "load the component again"
            )

    @property
    def viewed_elsewhere(self) -> bool:
        """Does somebody hold a tensor over this memory? Then it cannot be trusted to stay as it is."""
        return torch._C._storage_Use_Count(self.storage._cdata) > 1 + (self.memory is not None)
