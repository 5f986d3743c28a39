"""`FakeDevice`: what a test holds in its hand."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pytest_park.sizes import format_bytes, parse_size

from . import active
from .allocator import CachingAllocator, OutOfDeviceMemory
from .blocks import Block
from .driver import Driver, Report
from .faults import Fuse
from .holders import Holder, holders
from .ledger import Entry, expire
from .pending import PendingCopies
from .random import Generator
from .registration import NAME
from .sanitizer import RaceError, Sanitizer, stream_key
from .snapshot import snapshot

Direction = Literal["h2d", "d2h", "d2d"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy between host and device or between devices. *bytes* are those of the source."""

    kind: Direction
    bytes: int
    pinned: bool
    blocking: bool
    stream: int


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage that occupies device memory now: *requested* bytes in a block of *bytes*."""

    device: torch.device
    bytes: int
    requested: int
    storage: torch.UntypedStorage


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Device memory at one moment, *seconds* after `FakeDevice.record_memory` was turned on."""

    seconds: float
    allocated: int
    reserved: int


class FakeDevice:
    """A fake accelerator with *memory* bytes. All sizes are in bytes; setters also take text such as ``"64 MiB"``."""

    def __init__(
        self, index: int, memory: int, sanitizer: Sanitizer, *, data: bool = True, expandable_segments: bool = False
    ) -> None:
        self.index = index
        self.data = data
        self.device = torch.device(NAME, index)
        self._driver = Driver(memory)
        self.allocator = CachingAllocator(self._driver, expandable_segments=expandable_segments)
        self.entries: dict[int, Entry] = {}
        self.sanitizer = sanitizer
        self.pending = PendingCopies()
        #: The ids of the streams that were made, by priority; the last is the one that was handed out last.
        self.streams: dict[int, deque[int]] = {}
        #: How many allocations there were when the host last waited for the default stream.
        self.synchronized_at = 0
        self.transfers: list[Transfer] = []
        self.generator = Generator(self.device)
        self.memory_log: list[MemorySample] = []
        self.marks: list[tuple[float, str]] = []
        self._recording_since: float | None = None
        self._allocation_fuse = Fuse("allocation")
        self._host_copy_fuse = Fuse("host copy")
        self._device_copy_fuse = Fuse("device copy")

    def __repr__(self) -> str:
        return f"<FakeDevice {self.device}: {format_bytes(self.allocated)} of {format_bytes(self.memory)} allocated>"

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[FakeDevice, ...]:
        """All fake devices that were activated together, by index. Raises ``RuntimeError`` after their end."""
        if self not in active.cards:
            raise RuntimeError(f"{self.device} is no longer active: its activate() or its test has ended")
        return tuple(active.cards)

    @property
    def memory(self) -> int:
        """Capacity of the device."""
        return self._driver.total

    @property
    def free(self) -> int:
        """What the driver reports as free; raises if it was told to."""
        return self.mem_get_info()[0]

    @property
    def allocated(self) -> int:
        """Bytes in live blocks, each rounded up to 512, as ``torch.cuda.memory_allocated`` counts."""
        return self.allocator.allocated

    @property
    def requested(self) -> int:
        """Bytes of live storages, exactly."""
        return self.allocator.requested

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver, in use or cached."""
        return self.allocator.reserved

    @property
    def peak_allocated(self) -> int:
        """The highest `allocated` since activation or `reset_peak`."""
        return self.allocator.all.size_peak

    @property
    def allocations(self) -> int:
        """How many allocations there were so far."""
        return self.allocator.allocations

    def reset_peak(self) -> None:
        """Start a new measurement of the peaks from what is live now."""
        self.allocator.reset_peaks()

    def empty_cache(self) -> None:
        """Give cached segments back to the driver."""
        self.allocator.empty_cache()

    def live_storages(self) -> list[LiveStorage]:
        """The storages that occupy memory now, largest first."""
        found = []
        for entry in list(self.entries.values()):
            storage = entry()
            if storage is not None:
                found.append(LiveStorage(self.device, entry.block.size, entry.block.requested, storage))
        return sorted(found, key=lambda live: -live.bytes)

    def holders(self) -> list[Holder]:
        """The storages that occupy memory now, largest first, with the names of what keeps them alive."""
        return holders((live.requested, live.storage) for live in self.live_storages())

    def snapshot(self) -> dict[str, Any]:
        """The memory of all fake devices in the format of ``torch.cuda.memory._snapshot()``, which
        ``torch.cuda._memory_viz`` draws."""
        return snapshot([card.allocator for card in self.devices])

    # -- driver -------------------------------------------------------------------------------------------------------

    @property
    def other_process(self) -> int:
        """Bytes that another process holds; what the driver has free falls by exactly so many."""
        return self._driver.other_process

    @other_process.setter
    def other_process(self, size: int | str) -> None:
        self._driver.other_process = parse_size(size)

    @property
    def driver(self) -> Report:
        """How the driver answers ``mem_get_info``: honest, or one of the lies that real drivers tell."""
        return self._driver.report

    @driver.setter
    def driver(self, report: Report) -> None:
        self._driver.report = report

    @property
    def cap(self) -> int | None:
        """The process cap in bytes, if there is one."""
        return self._driver.cap

    def set_cap(self, size: int | str | None) -> None:
        """Limit what this process may reserve, as ``set_per_process_memory_fraction`` does; the driver's free memory
        does not show it. ``None`` lifts it."""
        self._driver.cap = None if size is None else parse_size(size)

    def mem_get_info(self) -> tuple[int, int]:
        """(free, total) as the driver reports them."""
        return self._driver.mem_get_info()

    # -- faults -------------------------------------------------------------------------------------------------------

    def fail_allocation(self, after: int = 1, error: BaseException | None = None) -> None:
        """Let the *after*-th device allocation from now fail once, with ``torch.OutOfMemoryError`` or *error*."""
        self._allocation_fuse.arm(
            after, torch.OutOfMemoryError(f"fakegpu out of memory, as asked (k = {after})") if error is None else error
        )

    def fail_host_copy(self, after: int = 1, error: BaseException | None = None) -> None:
        """Let the *after*-th copy to the host from now fail once, with ``MemoryError`` or *error*."""
        self._host_copy_fuse.arm(
            after, MemoryError(f"no host memory for a copy, as asked (k = {after})") if error is None else error
        )

    def fail_device_copy(self, after: int = 1, error: BaseException | None = None) -> None:
        """Let the *after*-th copy to the device from now fail once, with ``torch.OutOfMemoryError`` or *error*."""
        self._device_copy_fuse.arm(
            after, torch.OutOfMemoryError(f"fakegpu copy failed, as asked (k = {after})") if error is None else error
        )

    def clear_faults(self) -> None:
        """Forget all faults that have not happened yet."""
        for fuse in (self._allocation_fuse, self._host_copy_fuse, self._device_copy_fuse):
            fuse.disarm()

    # -- record -------------------------------------------------------------------------------------------------------

    @property
    def races(self) -> tuple[RaceError, ...]:
        """What the sanitizer found so far, on any device; each was also raised where it happened."""
        return tuple(self.sanitizer.found)

    def unwatched(self) -> AbstractContextManager[None]:
        """``with device.unwatched():`` is a stretch without the sanitizer, on all devices: for code that races on
        purpose, or whose time is taken."""
        return self.sanitizer.paused()

    def clear_transfers(self) -> None:
        self.transfers.clear()

    def record_memory(self, on: bool = True) -> None:
        """Add a sample to `memory_log` at each allocation from now on, or stop doing so."""
        self._recording_since = time.perf_counter() if on else None
        if on:
            self._sample()

    def mark(self, label: str) -> None:
        """Note *label* in `marks` at this moment of the recording."""
        if self._recording_since is not None:
            self._sample()
            self.marks.append((time.perf_counter() - self._recording_since, label))

    def _sample(self) -> None:
        assert self._recording_since is not None
        seconds = time.perf_counter() - self._recording_since
        self.memory_log.append(MemorySample(seconds, self.allocated, self.reserved))

    def retire(self) -> None:
        """The end of the device: memory that is still referred to can no longer be read, and says so. It stays in the
        books, so that `requested` and `holders` tell what outlived the device."""
        if sys.is_finalizing():  # a process that ends inside activate(): torch's kernels are gone already
            return
        for entry in list(self.entries.values()):
            storage = entry()
            if storage is not None:
                expire(storage)
        self.clear_faults()

    # -- called by the kernels ----------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Block:
        """A block of device memory; raises ``torch.OutOfMemoryError`` with the numbers that CUDA gives."""
        if self._allocation_fuse.armed:
            self._allocation_fuse.check()
        try:
            if self._recording_since is None:
                return self.allocator.allocate(nbytes, active.stream(self.index))
            return self._allocate_sampled(nbytes)
        except OutOfDeviceMemory as shortage:
            raise torch.OutOfMemoryError(self._out_of_memory(shortage.requested)) from None

    def _allocate_sampled(self, nbytes: int) -> Block:
        self._sample()  # frees are noticed at the next event: what was live just before this one
        block = self.allocator.allocate(nbytes, active.stream(self.index))
        self._sample()
        return block

    def current_stream_key(self) -> int:
        return stream_key(self.index, active.stream(self.index))

    def stream_synchronized(self, stream: int) -> None:
        """The host has waited for all work of *stream*."""
        self.allocator.stream_reached(stream)
        if not stream:
            self.synchronized_at = self.allocations
        self.sanitizer.host_waited_for_stream(stream_key(self.index, stream))
        self.deliver()

    def synchronized(self) -> None:
        """The host has waited for all work of the device."""
        self.allocator.device_reached()
        self.synchronized_at = self.allocations
        self.sanitizer.host_waited_for_all()
        self.deliver()

    def deliver(self) -> None:
        """Let arrive what the host has waited for."""
        self.pending.deliver(self.sanitizer.has_reached_host)

    def copied(self, kind: Direction, nbytes: int, *, pinned: bool, blocking: bool) -> None:
        """Note a copy that is about to happen; fails if it was asked to."""
        if kind == "h2d":
            self._device_copy_fuse.check()
        elif kind == "d2h":
            self._host_copy_fuse.check()
        self.transfers.append(Transfer(kind, nbytes, pinned, blocking, active.stream(self.index)))

    def _out_of_memory(self, wanted: int) -> str:
        """The words of ``CUDACachingAllocator.cpp``, so that what parses CUDA's message parses this one; as there,
        *wanted* is what the driver was asked for."""
        driver = self._driver
        other = f"Of the allocated memory {format_bytes(self.allocated)} is allocated by PyTorch, and "
        cap = f"{format_bytes(driver.cap)} allowed; " if driver.cap is not None else ""
        return (
            f"fakegpu out of memory. Tried to allocate {format_bytes(wanted)}. GPU {self.index} has a total capacity"
            f" of {format_bytes(driver.total)} of which {format_bytes(driver.free)} is free. {cap}"
            f"Including non-PyTorch memory, {format_bytes(driver.other_process + driver.taken)} memory in use. {other}"
            f"{format_bytes(self.reserved - self.allocated)} is reserved by PyTorch but unallocated. If reserved but"
            " unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid"
            " fragmentation."
        )
