"""A model of CUDA's caching allocator for one device: how many bytes are allocated, reserved, and when it runs out.

It keeps addresses and sizes, no data. The rules and the constants are those of ``c10/cuda/CUDACachingAllocator.cpp``
(torch 2.13): requests are rounded to 512 bytes; requests up to 1 MiB come from 2 MiB segments of the small pool, larger
ones up to 10 MiB from 20 MiB segments of the large pool, still larger ones get a segment of their own rounded to 2 MiB;
the smallest free block that fits is taken and split; free neighbours merge; segments stay reserved after their blocks
are freed; before an allocation fails, all free segments go back to the driver and it is tried once more.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .driver import Driver

KIB, MIB = 1024, 1024**2
MIN_BLOCK = 512  # kMinBlockSize: all sizes are rounded to at least 512 bytes
SMALL_REQUEST = MIB  # kSmallSize: largest "small" allocation
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer
MIN_LARGE_REQUEST = 10 * MIB  # kMinLargeAlloc: between 1 and 10 MiB may use a kLargeBuffer
ROUND_LARGE = 2 * MIB  # kRoundLarge
FIRST_ADDRESS = 0x7F00_0000_0000


class OutOfDeviceMemory(Exception):
    """The driver has no segment for this request, also after all free segments went back."""

    def __init__(self, requested: int) -> None:
        super().__init__(requested)
        self.requested = requested


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment; *requested* is 0 while it is free."""

    address: int
    size: int
    segment: Segment
    requested: int = 0
    stream: int = 0
    previous: Block | None = None
    following: Block | None = None
    uses: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Segment:
    """What the driver gave in one piece."""

    address: int
    size: int
    small: bool
    stream: int
    first: Block = field(init=False)

    def blocks(self) -> Iterator[Block]:
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.following


class Counter:
    """One row of ``torch.cuda.memory_stats``: what there is, how much it ever was, and all that came."""

    __slots__ = ("allocated", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = 0

    def rise(self, amount: int) -> None:
        self.allocated += amount
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def measures(self) -> dict[str, int]:
        """The four columns of the row; what was freed is what came and is not there."""
        freed = self.allocated - self.current
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": freed}


class Counters:
    """The rows that torch keeps for a pool, and once more for both together."""

    __slots__ = ("allocated_bytes", "allocation", "requested_bytes", "reserved_bytes", "segment")

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, Counter())

    allocation: Counter
    allocated_bytes: Counter
    requested_bytes: Counter
    segment: Counter
    reserved_bytes: Counter

    def rows(self) -> dict[str, Counter]:
        return {name: getattr(self, name) for name in self.__slots__}


def rounded(nbytes: int) -> int:
    """The size of the block for a request of *nbytes* (``round_size``)."""
    return MIN_BLOCK if nbytes < MIN_BLOCK else -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int) -> int:
    """The size of the segment that is asked of the driver for a block of *size* (``get_allocation_size``)."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """The blocks of one device. Bytes everywhere; addresses are made up.

    ``free`` may be called from a garbage collection in the middle of anything, also of ``allocate`` in the same thread.
    So it only queues the block, and whoever looks next, under the lock, puts the queue in order first.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.all, self.small, self.large = Counters(), Counters(), Counters()
        self.retries = 0
        self.out_of_memory_count = 0
        self._lock = threading.RLock()
        self._freed: deque[Block] = deque()
        # free blocks by (pool is small, stream), each list sorted by (size, address): std::set with BlockComparatorSize
        self._free: dict[tuple[bool, int], list[tuple[int, int, Block]]] = {}
        self._waiting: list[Block] = []  # freed, but another stream may still work on them
        self._segments: dict[int, Segment] = {}
        self._next_address = FIRST_ADDRESS

    # -- the two hot paths -------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """A block for *nbytes* (> 0) on *stream*; raises `OutOfDeviceMemory`."""
        with self._lock:
            self._settle()
            size = MIN_BLOCK if nbytes < MIN_BLOCK else -(-nbytes // MIN_BLOCK) * MIN_BLOCK
            is_small = size <= SMALL_REQUEST
            block = self._take_free(size, is_small, stream) or self._take_new(size, is_small, stream)
            rest = block.size - size
            if rest >= MIN_BLOCK if is_small else rest > SMALL_REQUEST:  # should_split
                self._split(block, size, is_small, stream)
            block.requested = nbytes
            size = block.size
            for counters in (self.all, self.small if is_small else self.large):
                counters.allocation.rise(1)
                counters.allocated_bytes.rise(size)
                counters.requested_bytes.rise(nbytes)
            return block

    def free(self, block: Block) -> None:
        """Give *block* back; safe at any point of any thread."""
        self._freed.append(block)

    def stream_reached(self, stream: int) -> None:
        """All work of *stream* is done: what waited for it is free (``process_events``)."""
        with self._lock:
            self._settle()
            for block in [block for block in self._waiting if stream in block.uses]:
                block.uses.discard(stream)
                if not block.uses:
                    self._waiting.remove(block)
                    self._make_free(block)

    def device_reached(self) -> None:
        """All work of all streams is done."""
        with self._lock:
            self._settle()
            waiting, self._waiting = self._waiting, []
            for block in waiting:
                block.uses.clear()
                self._make_free(block)

    # -- what can be asked --------------------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Bytes in blocks that are in use, rounding included (``memory_allocated``)."""
        self.settle()
        return self.all.allocated_bytes.current

    @property
    def requested(self) -> int:
        """Bytes in use as they were asked for, without rounding."""
        self.settle()
        return self.all.requested_bytes.current

    @property
    def reserved(self) -> int:
        """Bytes that the driver gave and has not got back (``memory_reserved``)."""
        return self.all.reserved_bytes.current

    def settle(self) -> None:
        """Put all queued frees in order."""
        with self._lock:
            self._settle()

    def empty_cache(self) -> int:
        """Give all wholly free segments back to the driver; the bytes given back."""
        with self._lock:
            self._settle()
            given = 0
            for segment in [s for s in self._segments.values() if s.first.following is None and not s.first.requested]:
                self._remove_free(segment.first)
                del self._segments[segment.address]
                self.driver.give_back(segment.size)
                given += segment.size
                for counters in (self.all, self.small if segment.small else self.large):
                    counters.segment.current -= 1
                    counters.reserved_bytes.current -= segment.size
            return given

    def segments(self) -> list[Segment]:
        """The segments as they are now, by address."""
        with self._lock:
            self._settle()
            return sorted(self._segments.values(), key=lambda segment: segment.address)

    def reset_peaks(self) -> None:
        for counters in (self.all, self.small, self.large):
            for row in counters.rows().values():
                row.peak = row.current

    def reset_accumulated(self) -> None:
        for counters in (self.all, self.small, self.large):
            for row in counters.rows().values():
                row.allocated = row.current
        self.retries = self.out_of_memory_count = 0

    def statistics(self) -> dict[str, Any]:
        """The keys of ``torch.cuda.memory_stats`` that the model knows."""
        self.settle()
        found: dict[str, Any] = {}
        for pool, counters in (("all", self.all), ("large_pool", self.large), ("small_pool", self.small)):
            rows = counters.rows()
            # without frees that wait for an event, active and allocated are the same thing
            rows["active"], rows["active_bytes"] = rows["allocation"], rows["allocated_bytes"]
            for name, row in rows.items():
                found |= {f"{name}.{pool}.{measure}": value for measure, value in row.measures().items()}
            inactive = [b for b in self._split_free_blocks() if pool == "all" or b.segment.small == (pool[0] == "s")]
            found[f"inactive_split.{pool}.current"] = len(inactive)
            found[f"inactive_split_bytes.{pool}.current"] = sum(block.size for block in inactive)
        found["num_alloc_retries"] = self.retries
        found["num_ooms"] = self.out_of_memory_count
        found["num_device_alloc"] = self.all.segment.allocated
        found["num_device_free"] = self.all.segment.measures()["freed"]
        return dict(sorted(found.items()))

    def _split_free_blocks(self) -> list[Block]:
        with self._lock:
            return [
                block
                for segment in self._segments.values()
                if segment.first.following is not None
                for block in segment.blocks()
                if not block.requested
            ]

    # -- mechanism; the lock is held ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        freed = self._freed
        while freed:
            self._free_block(freed.popleft())

    def _take_free(self, size: int, is_small: bool, stream: int) -> Block | None:
        free = self._free.get((is_small, stream))
        if not free:
            return None
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        return free.pop(place)[2]

    def _take_new(self, size: int, is_small: bool, stream: int) -> Block:
        wanted = segment_size(size)
        if not self.driver.take(wanted):
            self.retries += 1
            self.empty_cache()
            if not self.driver.take(wanted):
                self.out_of_memory_count += 1
                raise OutOfDeviceMemory(wanted)
        segment = Segment(self._next_address, wanted, is_small, stream)
        self._next_address += wanted
        segment.first = Block(segment.address, wanted, segment, stream=stream)
        self._segments[segment.address] = segment
        for counters in (self.all, self.small if is_small else self.large):
            counters.segment.rise(1)
            counters.reserved_bytes.rise(wanted)
        return segment.first

    def _split(self, block: Block, size: int, is_small: bool, stream: int) -> None:
        rest = Block(block.address + size, block.size - size, block.segment, 0, stream, block, block.following)
        if block.following is not None:
            block.following.previous = rest
        block.following = rest
        block.size = size
        insort(self._free.setdefault((is_small, stream), []), (rest.size, rest.address, rest))

    def _free_block(self, block: Block) -> None:
        is_small = block.segment.small
        for counters in (self.all, self.small if is_small else self.large):
            counters.allocation.current -= 1
            counters.allocated_bytes.current -= block.size
            counters.requested_bytes.current -= block.requested
        if block.uses:
            self._waiting.append(block)
        else:
            self._make_free(block)

    def _make_free(self, block: Block) -> None:
        block.requested = 0
        before, after = block.previous, block.following
        if before is not None and not before.requested:
            self._remove_free(before)
            before.size += block.size
            before.following = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and not after.requested:
            self._remove_free(after)
            block.size += after.size
            block.following = after.following
            if after.following is not None:
                after.following.previous = block
        insort(self._free.setdefault((block.segment.small, block.stream), []), (block.size, block.address, block))

    def _remove_free(self, block: Block) -> None:
        free = self._free[block.segment.small, block.stream]
        del free[bisect_left(free, (block.size, block.address))]
