"""Taking memory away from a device until its headroom is a chosen number of bytes, and giving it back."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from pytest_park.devices import ParkDevice
from pytest_park.sizes import format_bytes, parse_size

if TYPE_CHECKING:
    import torch

# The allocators of torch hand out nothing smaller, so no ballast makes a finer step.
_SMALLEST_BLOCK = 512


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
            surplus = self.bytes - wanted
            self._hold(surplus - surplus % _SMALLEST_BLOCK)
            return
        # Another process can only have what the driver has. Only where the allocator's unused reserve alone is more
        # than is wanted must ballast take that, while the driver has nothing, so that the ballast cannot enlarge the
        # reserve.
        self._give_away(self._device.free)
        if self.bytes > wanted:
            self._hold(self.bytes)
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

    def _hold(self, size: int) -> None:
        """Hold ``size`` bytes as ballast, in as few pieces as the device still has room for, or what there is."""
        import torch

        piece = size
        while size >= _SMALLEST_BLOCK and piece >= _SMALLEST_BLOCK:
            piece = min(piece, size)
            try:
                self._ballast.append(torch.empty(piece, dtype=torch.uint8, device=self._device.device))
            except torch.OutOfMemoryError:
                piece = piece // 2 // _SMALLEST_BLOCK * _SMALLEST_BLOCK
            else:
                size -= piece


def _process_cap(device: ParkDevice) -> int | None:
    """The most that this process may reserve, in bytes, or None where no cap can be set."""
    import torch

    module = torch.get_device_module(device.device)
    fraction = getattr(module, "get_per_process_memory_fraction", None)
    return int(fraction(device.device) * device.memory) if fraction is not None else None
