"""What tests get as ``park_device``: one interface over the fake accelerator and a real one."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class ParkDevice(Protocol):
    """What a test may ask of its device, fake or real. All sizes are bytes."""

    @property
    def device(self) -> torch.device:
        """The device to put modules and tensors on."""

    @property
    def memory(self) -> int:
        """Its capacity."""

    @property
    def free(self) -> int:
        """What the driver reports as free."""

    @property
    def allocated(self) -> int:
        """What live tensors of this process occupy, as the allocator rounds it."""

    @property
    def reserved(self) -> int:
        """What the allocator of this process holds, in use or not."""

    @property
    def peak_allocated(self) -> int:
        """The largest ``allocated`` since the test began or :meth:`reset_peak` was called."""

    def reset_peak(self) -> None:
        """Start a new peak from what is allocated now."""

    def empty_cache(self) -> None:
        """Give back to the driver what the allocator holds without need."""


class RealDevice:
    """A :class:`ParkDevice` over an accelerator that torch can use, by the functions of its device module."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self._module: ModuleType = torch.get_device_module(device)
        if not hasattr(self._module, "mem_get_info"):
            raise NotImplementedError(
                f"torch.{device.type} cannot tell how much memory is free (it has no mem_get_info), "
                "so tests of memory cannot run on it."
            )
        self.reset_peak()

    def __repr__(self) -> str:
        return f"RealDevice({str(self.device)!r})"

    @property
    def memory(self) -> int:
        return int(self._module.mem_get_info(self.device)[1])

    @property
    def free(self) -> int:
        return int(self._module.mem_get_info(self.device)[0])

    @property
    def allocated(self) -> int:
        return int(self._module.memory_allocated(self.device))

    @property
    def reserved(self) -> int:
        return int(self._module.memory_reserved(self.device))

    @property
    def peak_allocated(self) -> int:
        return int(self._module.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        self._module.synchronize(self.device)
        self._module.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all work given to it so far."""
    import torch

    torch.get_device_module(device).synchronize(device)
