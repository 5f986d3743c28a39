"""``torch.from_dlpack`` of device tensors: torch knows the device number of a back end from outside only by its first
name, ``privateuseone``, and not by the one that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType

_native = torch.Tensor.__dlpack_device__


def patches() -> Iterator[tuple[Any, str, Any]]:
    yield torch.Tensor, "__dlpack_device__", _dlpack_device


def _dlpack_device(self: torch.Tensor) -> tuple[Any, int]:
    if self.device.type == "fakegpu":
        return DLDeviceType.kDLExtDev, self.get_device()
    return _native(self)
