"""Taking memory away from a device until its headroom is a chosen number of bytes, and giving it back."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_park.devices import ParkDevice
from pytest_park.sizes import MiB, format_bytes, parse_size

if TYPE_CHECKING:
    import torch

# Ballast is held first in multiples of 2 MiB, the unit in which torch's allocators take memory from the driver: any
# other large piece can occupy up to 1 MiB more than was asked for. What is left is held in pieces of up to 1 MiB, which
# come from a pool of their own that is exact to 512 bytes.
_SMALLEST_BLOCK: Final = 512
_GRAINS: Final = (2 * MiB, _SMALLEST_BLOCK)
# To fill what the allocator has reserved, also the smallest piece that comes from the pool of large blocks.
_GRAINS_OF_RESERVE: Final = (2 * MiB, MiB + _SMALLEST_BLOCK, _SMALLEST_BLOCK)


class Headroom:
    """Call it with a size to make the headroom of a device that many bytes: ``headroom("64 MiB")``.

    Headroom is what the driver reports as free, within the process cap, and what the allocator has reserved but not
    handed out. On the fake device the surplus goes to another process, so that the result is exact to the byte. On a
    real one it is held by a tensor as ballast; the result can then be off by less than one block of the allocator (512
    bytes) and by what other processes do meanwhile: :attr:`bytes` is what there is.
    """

    def __init__(self, device: ParkDevice) -> None:
        self._device = device
        self._ballast: list[torch.Tensor] = []
        self._given_away = 0

    def __call__(self, size: int | str) -> int:
        """Make the headroom ``size`` bytes, an int or a text such as ``"1 GiB"``; returns what was reached.

        It replaces what an earlier call made. Raises ``ValueError`` for a size that is none, and for more than the
        device has; the headroom is then as before the first call.
        """
        wanted = parse_size(size)
        self.undo()
        most = self.bytes
        if wanted > most:
            raise ValueError(
                f"headroom({size!r}) is more than {self._device!r} has: {format_bytes(most)} ({most} bytes) of its "
                f"{format_bytes(self._device.memory)} are free or reserved but unused. Ask for less, free tensors first"
                f"{', or give the fake device more memory (--park-fake-memory)' if self._is_fake else ''}."
            )
        try:
            self._take(wanted)
        except BaseException:
            self.undo()
            raise
        return self.bytes

    @property
    def bytes(self) -> int:
        """The headroom of the device now."""
        device = self._device
        free = device.free
        cap = _process_cap(device)
        if cap is not None:
            free = min(free, cap - device.reserved)
        return max(0, free + device.reserved - device.allocated)

    def undo(self) -> None:
        """Give back everything that was taken."""
        self._ballast.clear()
        if self._given_away:
            self._give_away(-self._given_away)
        gc.collect()  # tensors of the test that only a cycle holds would otherwise vanish at some later moment
        self._device.empty_cache()

    @property
    def _is_fake(self) -> bool:
        return hasattr(self._device, "other_process")

    def _take(self, wanted: int) -> None:
        if not self._is_fake:
            self._hold(self.bytes - wanted)
            return
        # Another process can only have what the driver has. Only where the allocator's unused reserve alone is more
        # than is wanted must ballast take that, while the driver has nothing, so that the ballast cannot enlarge the
        # reserve.
        self._give_away(self._device.free)
        if self.bytes > wanted:
            self._hold(self.bytes, _GRAINS_OF_RESERVE)
        if self.bytes > wanted:
            raise RuntimeError(
                f"the headroom of {self._device!r} stays at {self.bytes} bytes instead of {wanted}: its allocator "
                "holds blocks that are too fragmented to be filled. Free tensors first, or ask for more."
            )
        self._give_away(self.bytes - wanted)

    def _give_away(self, size: int) -> None:
        """Let another process hold ``size`` bytes more, or fewer if it is negative."""
        fake: Any = self._device
        fake.other_process += size
        self._given_away += size

    def _hold(self, size: int, grains: Sequence[int] = _GRAINS) -> None:
        """Hold ``size`` bytes as ballast, in as few pieces as the device still has room for, or what there is."""
        import torch

        for grain in grains:
            piece = min(size, MiB) if grain < MiB else size
            while (piece := min(piece, size) // grain * grain) > 0:
                try:
                    self._ballast.append(torch.empty(piece, dtype=torch.uint8, device=self._device.device))
                except torch.OutOfMemoryError:
                    piece //= 2
                else:
                    size -= piece


def _process_cap(device: ParkDevice) -> int | None:
    """The most that this process may reserve, in bytes, or None where no cap can be set."""
    import torch

    module = torch.get_device_module(device.device)
    fraction = getattr(module, "get_per_process_memory_fraction", None)
    return int(fraction(device.device) * device.memory) if fraction is not None else None
