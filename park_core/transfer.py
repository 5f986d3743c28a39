"""Moving the bytes of a storage group between host and device."""

from __future__ import annotations

from typing import Any

import torch

from park_core.host_copy import HostCopy
from park_core.storage import StorageGroup, bytes_of

__all__ = ["backend_of", "to_device", "to_host"]


def backend_of(device: torch.device) -> Any:
    """The module that speaks for a device type: ``torch.cuda``, ``torch.xpu``, ... All that we know of a backend."""
    return torch.get_device_module(device.type)


def to_host(group: StorageGroup, storage: torch.UntypedStorage) -> HostCopy:
    """A new host copy of a resident group: pageable, exactly as large as the storage. Blocks until it is there."""
    host = HostCopy.empty(group.nbytes)
    bytes_of(host.storage).copy_(bytes_of(storage))
    return host


def to_device(group: StorageGroup) -> torch.UntypedStorage:
    """New device memory with the bytes of the group's host copy. Blocks until they are there."""
    assert group.host is not None
    target = torch.empty(group.nbytes, dtype=torch.uint8, device=group.device)
    target.copy_(bytes_of(group.host.storage))
    return target.untyped_storage()
