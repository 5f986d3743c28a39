"""The device under the contract: its bytes, its headroom, and the faults it can be asked for.

Everything goes through ``torch.get_device_module(device)``, which has the functions of ``torch.cuda`` on every backend.
Faults need the fake device; what cannot be had on a real one raises `NotApplicable`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .verdict import NotApplicable

MIB = 1024**2
_SMALLEST_BLOCK = 512
# Requests of up to 1 MiB and larger ones come from different pools of torch's allocators; each size fills what is left.
_BALLAST = [64 * MIB, 16 * MIB, 8 * MIB, 4 * MIB, 2 * MIB, MIB + _SMALLEST_BLOCK]
_BALLAST += [MIB >> shift for shift in range(12)]


class Transfer(Protocol):
    """One copy as the fake device logs it."""

    @property
    def kind(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def blocking(self) -> bool: ...


class FakeDevice(Protocol):
    """What the contract uses of ``pytest_park.fakegpu.FakeDevice``; any object with these names will do."""

    other_process: int
    driver: Any

    @property
    def requested(self) -> int: ...
    @property
    def allocations(self) -> int: ...
    @property
    def transfers(self) -> Sequence[Transfer]: ...
    @property
    def memory(self) -> int: ...
    def clear_transfers(self) -> None: ...
    def fail_allocation(self, after: int, error: BaseException | None = None) -> None: ...
    def fail_host_copy(self, after: int, error: BaseException | None = None) -> None: ...
    def fail_device_copy(self, after: int, error: BaseException | None = None) -> None: ...
    def clear_faults(self) -> None: ...


class Device:
    """Memory of one accelerator, counted and made scarce. All sizes are bytes."""

    def __init__(self, device: torch.device, fake: FakeDevice | None) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._fake = fake
        self._ballast: list[torch.Tensor] = []
        self._cap_is_set = False

    # -- counting -----------------------------------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether `bytes` counts what was asked for and not what the allocator rounded it to."""
        return self._fake is not None or "requested_bytes.all.current" in self._statistics()

    @property
    def bytes(self) -> int:
        """Live bytes by storage, without our own ballast."""
        return self._live() - sum(tensor.untyped_storage().nbytes() for tensor in self._ballast)

    @property
    def slack(self) -> int:
        """What a count may be off by for each tensor, where the backend only tells rounded sizes."""
        return 0 if self.exact else _SMALLEST_BLOCK

    def settled_bytes(self) -> int:
        """`bytes` after garbage in reference cycles is gone; slower."""
        gc.collect()
        return self.bytes

    @property
    def allocations(self) -> int:
        """How many allocations there were so far."""
        if self._fake is not None:
            return self._fake.allocations
        count = self._statistics().get("allocation.all.allocated")
        if count is None:
            raise NotApplicable(f"torch.{self.device.type} does not count allocations")
        return int(count)

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    @property
    def peak(self) -> int:
        """The most that was allocated since `reset_peak`, in blocks of the allocator."""
        return int(self._module.max_memory_allocated(self.device))

    @property
    def allocated(self) -> int:
        """What live tensors occupy, in blocks of the allocator."""
        return int(self._module.memory_allocated(self.device))

    @property
    def headroom(self) -> int:
        """What the driver has free and what the allocator reserved without using it."""
        return int(self._module.mem_get_info(self.device)[0]) + self._unused()

    def synchronize(self) -> None:
        """Wait for all that the device has to do."""
        self._module.synchronize(self.device)

    # -- scarcity -----------------------------------------------------------------------------------------------------

    def set_headroom(self, wanted: int, *, in_allocator: int | None = None) -> None:
        """Make the headroom *wanted* bytes, of which *in_allocator* lie free in the allocator and the rest in the
        driver.

        On the fake device another process takes the driver's part, exact to the byte. On a real one it is ballast.
        """
        self.relieve()
        in_allocator = _spare(wanted, in_allocator)
        self._module.empty_cache()
        spare = self._block(in_allocator) if in_allocator else None
        if self._fake is not None:
            self._fake.other_process = self._fake.memory - self._reserved()
            self._fill()
            del spare  # a large block is rounded up, so its bytes are counted
            self._fake.other_process = max(0, self._fake.memory - self._reserved() - (wanted - self._unused()))
        else:
            self._hold(self.headroom - wanted + in_allocator)
            del spare

    def set_cap(self, wanted: int) -> None:
        """Let the process cap leave *wanted* bytes of headroom, while the driver has plenty."""
        self.relieve()
        limit = getattr(self._module, "set_per_process_memory_fraction", None)
        if limit is None:
            raise NotApplicable(f"torch.{self.device.type} has no set_per_process_memory_fraction")
        self._module.empty_cache()
        in_allocator = _spare(wanted, None)
        spare = self._block(in_allocator) if in_allocator else None
        total = int(self._module.mem_get_info(self.device)[1])
        limit(self._reserved() / total, self.device)
        self._cap_is_set = True
        self._fill()
        del spare
        limit((self._reserved() + wanted - self._unused()) / total, self.device)

    def set_fragments(self, count: int, size: int) -> None:
        """Leave no headroom but *count* free pieces of *size* bytes each in the allocator, with live ones between."""
        self.relieve()
        pieces = [self._block(size) for _ in range(2 * count + 1)]
        self.fake.other_process = self.fake.memory - self._reserved()
        self._fill()
        self._ballast += pieces[::2]

    def relieve(self) -> None:
        """Give back everything that was made scarce."""
        self._ballast.clear()
        if self._cap_is_set:
            self._module.set_per_process_memory_fraction(1.0, self.device)
            self._cap_is_set = False
        if self._fake is not None:
            self._fake.other_process = 0
            self._fake.driver = "honest"
        self._module.empty_cache()

    # -- the fake device only -----------------------------------------------------------------------------------------

    @property
    def fake(self) -> FakeDevice:
        """The fake device; `NotApplicable` where there is none."""
        if self._fake is None:
            raise NotApplicable("faults and transfer logs need the fake device: pass Parkable(fake_device=...)")
        return self._fake

    @property
    def is_fake(self) -> bool:
        return self._fake is not None

    def arm(self, kind: str, after: int, error: BaseException | None = None) -> None:
        """Let the *after*-th ``allocation``, ``host copy`` or ``device copy`` from now fail once."""
        arms: dict[str, Callable[[int, BaseException | None], None]] = {
            "allocation": self.fake.fail_allocation,
            "host copy": self.fake.fail_host_copy,
            "device copy": self.fake.fail_device_copy,
        }
        arms[kind](after, error)

    def disarm(self) -> None:
        if self._fake is not None:
            self._fake.clear_faults()

    # -- mechanism ----------------------------------------------------------------------------------------------------

    def _live(self) -> int:
        if self._fake is not None:
            return self._fake.requested
        requested = self._statistics().get("requested_bytes.all.current")
        return self.allocated if requested is None else int(requested)

    def _statistics(self) -> dict[str, Any]:
        statistics = getattr(self._module, "memory_stats", None)
        return dict(statistics(self.device)) if statistics is not None else {}

    def _reserved(self) -> int:
        return int(self._module.memory_reserved(self.device))

    def _unused(self) -> int:
        return self._reserved() - self.allocated

    def _block(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _fill(self) -> None:
        """Use up what the allocator has reserved without using it; the driver has nothing more to give now."""
        self._fill_current_stream()
        if self._fake is not None and self._unused() >= _SMALLEST_BLOCK:
            # What lies free in a segment of another stream is handed out to that stream only.
            segments = self._module.memory_snapshot()
            for number in sorted({segment["stream"] for segment in segments if segment["device"] == self.device.index}):
                with self._module.Stream(self.device, stream_id=number):
                    self._fill_current_stream()

    def _fill_current_stream(self) -> None:
        for size in _BALLAST:
            while self._unused() >= size:
                try:
                    self._ballast.append(self._block(size))
                except torch.OutOfMemoryError:
                    break

    def _hold(self, surplus: int) -> None:
        piece = surplus // _SMALLEST_BLOCK * _SMALLEST_BLOCK
        while surplus >= _SMALLEST_BLOCK and piece >= _SMALLEST_BLOCK:
            piece = min(piece, surplus // _SMALLEST_BLOCK * _SMALLEST_BLOCK)
            try:
                self._ballast.append(self._block(piece))
            except torch.OutOfMemoryError:
                piece = piece // 2 // _SMALLEST_BLOCK * _SMALLEST_BLOCK
            else:
                surplus -= piece


def _spare(wanted: int, in_allocator: int | None) -> int:
    """How much of a headroom lies in the allocator: by default half, in one block of its pool for small requests."""
    part = min(wanted // 2, MIB) if in_allocator is None else min(wanted, in_allocator)
    return part // _SMALLEST_BLOCK * _SMALLEST_BLOCK
