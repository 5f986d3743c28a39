"""``torch.accelerator`` on the fake device. Its functions end in C++ that asks an allocator and a guard written in C++;
while a fake device is active they end here. Each private function of torch is replaced in this one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import active, device_module, streams


def _exchange_device(index: int) -> int:
    previous = active.index()
    active.make_current(index)
    return previous


def _maybe_exchange_device(index: int) -> int:
    return _exchange_device(index) if index >= 0 else active.index()


def _capability(index: int) -> dict[str, Any]:
    return {"supported_dtypes": device_module.supported_dtypes()}


_REPLACED = {
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_emptyCache": device_module.empty_cache,
    "_accelerator_emptyHostCache": lambda: None,
    "_accelerator_getDeviceStats": device_module.memory_stats_as_nested_dict,
    "_accelerator_resetAccumulatedStats": device_module.reset_accumulated_memory_stats,
    "_accelerator_resetPeakStats": device_module.reset_peak_memory_stats,
    "_accelerator_getMemoryInfo": device_module.mem_get_info,
    "_accelerator_synchronizeDevice": device_module.synchronize,
    "_accelerator_getStream": streams.current_stream,
    "_accelerator_setStream": streams.set_stream,
    "_accelerator_getDeviceIndex": active.index,
    "_accelerator_setDeviceIndex": active.make_current,
    "_accelerator_exchangeDevice": _exchange_device,
    "_accelerator_maybeExchangeDevice": _maybe_exchange_device,
    "_accelerator_getDeviceCapability": _capability,
    "_accelerator_hooks_device_count": device_module.device_count,
}


def patches() -> Iterator[tuple[Any, str, Any]]:
    for name, replacement in _REPLACED.items():
        if hasattr(torch._C, name):  # what a torch does not have yet, its torch.accelerator does not call
            yield torch._C, name, replacement
