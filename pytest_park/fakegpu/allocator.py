"""A model of CUDA's caching allocator for one device: how many bytes are allocated, reserved, and when it runs out.

It keeps addresses and sizes, no data. The rules and the constants are those of ``c10/cuda/CUDACachingAllocator.cpp``
(torch 2.13): requests are rounded to 512 bytes; requests up to 1 MiB come from 2 MiB segments of the small pool, larger
ones up to 10 MiB from 20 MiB segments of the large pool, still larger ones get a segment of their own rounded to 2 MiB;
the smallest free block that fits is taken and split; free neighbours merge; segments stay reserved after their blocks
are freed; before an allocation fails, all free segments go back to the driver and it is tried once more.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from .blocks import Block, FreeList, Pool, Segment

if TYPE_CHECKING:
    from .driver import Driver

MIB = 1024**2
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


def rounded(nbytes: int) -> int:
    """The size of the block for a request of *nbytes* (``round_size``)."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """The size of the segment that is asked of the driver for a block of *size* (``get_allocation_size``)."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """The blocks of one device. Bytes everywhere; addresses are made up.

    `free` may be called from a garbage collection in the middle of anything, also of `allocate` in the same thread.
    So it only queues the block, and whoever looks next, under the lock, puts the queue in order first.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.all, self.small, self.large = Pool(0), Pool(MIN_BLOCK), Pool(SMALL_REQUEST + 1)
        self.retries = 0
        self.times_waited = 0
        self.out_of_memory_count = 0
        self._lock = threading.RLock()
        self._freed: deque[Block] = deque()
        #: Give a block back; safe at any point of any thread, because it only queues it.
        self.free = self._freed.append
        self._waiting: list[tuple[int, Block]] = []  # freed at a tick, but another stream may still work on them
        self._ticks = 0
        self._segments: dict[int, Segment] = {}
        self._next_address = FIRST_ADDRESS

    # -- the hot path -------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """A block for *nbytes* (> 0) on *stream*; raises `OutOfDeviceMemory`."""
        with self._lock:
            if self._freed:
                self._settle()
            size = (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK
            pool = self.small if size <= SMALL_REQUEST else self.large
            free = pool.free.get(stream)
            block = free.take(size) if free else None
            if block is None:
                block = self._new_segment(size, pool, stream)
            if block.size - size >= pool.minimum_rest:
                self._split(block, size, pool, stream)
            else:
                size = block.size
            block.requested = nbytes
            pool.take(size, nbytes)
            self.all.take(size, nbytes)
            return block

    def tick(self) -> int:
        """A moment: what is freed from now on comes after it."""
        with self._lock:
            self._settle()
            self._ticks += 1
            return self._ticks

    def stream_reached(self, stream: int, moment: int | None = None) -> None:
        """The work that *stream* had at *moment* (by default now) is done: what waited for it is free."""
        with self._lock:
            self._settle()
            still_waiting = []
            for freed_at, block in self._waiting:
                assert block.uses is not None
                if moment is None or freed_at < moment:
                    block.uses.discard(stream)
                if block.uses:
                    still_waiting.append((freed_at, block))
                else:
                    self._make_free(block)
            self._waiting = still_waiting

    def device_reached(self) -> None:
        """All work of all streams is done."""
        with self._lock:
            self._settle()
            waiting, self._waiting = self._waiting, []
            for _, block in waiting:
                self._make_free(block)

    # -- what can be asked --------------------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Bytes in blocks that are in use, rounding included (``memory_allocated``)."""
        self.settle()
        return self.all.size

    @property
    def requested(self) -> int:
        """Bytes in use as they were asked for, without rounding."""
        self.settle()
        return self.all.requested

    @property
    def reserved(self) -> int:
        """Bytes that the driver gave and has not got back (``memory_reserved``)."""
        return self.all.reserved

    def settle(self) -> None:
        """Put all queued frees in order."""
        with self._lock:
            self._settle()

    def empty_cache(self) -> int:
        """Give all wholly free segments back to the driver; the bytes given back."""
        with self._lock:
            self.times_waited += 1
            self.device_reached()  # synchronize_and_free_events: what waits for a stream is waited for
            given = 0
            for segment in [s for s in self._segments.values() if s.first.following is None and not s.first.requested]:
                segment.pool.free[segment.stream].remove(segment.first)
                del self._segments[segment.address]
                self.driver.give_back(segment.size)
                given += segment.size
                self.all.unreserve(segment.size)
                segment.pool.unreserve(segment.size)
            return given

    def segments(self) -> list[Segment]:
        """The segments as they are now, by address."""
        with self._lock:
            self._settle()
            return sorted(self._segments.values(), key=lambda segment: segment.address)

    def waiting(self) -> set[Block]:
        """Blocks that were freed while another stream may still work on them."""
        with self._lock:
            self._settle()
            return {block for _, block in self._waiting}

    def reset_peaks(self) -> None:
        for pool in (self.all, self.small, self.large):
            pool.reset_peaks()

    def reset_accumulated(self) -> None:
        for pool in (self.all, self.small, self.large):
            pool.reset_accumulated()
        self.retries = self.out_of_memory_count = 0

    def statistics(self) -> dict[str, Any]:
        """The keys of ``torch.cuda.memory_stats`` that the model knows."""
        self.settle()
        found: dict[str, Any] = {}
        for name, pool in (("all", self.all), ("large_pool", self.large), ("small_pool", self.small)):
            rows = pool.rows()
            waiting = [block for _, block in self._waiting if pool is self.all or block.segment.pool is pool]
            for active, row, amount in (
                ("active", "allocation", len(waiting)),
                ("active_bytes", "allocated_bytes", sum(block.size for block in waiting)),
            ):  # active is also what was freed and waits for a stream; its peak counts what waits now
                rows[active] = dict(rows[row])
                rows[active]["current"] += amount
                rows[active]["freed"] -= amount
                rows[active]["peak"] = max(rows[active]["peak"], rows[active]["current"])
            for row, measures in rows.items():
                found |= {f"{row}.{name}.{measure}": value for measure, value in measures.items()}
        # the model never limits what may be split, so nothing is oversize
        for row in ("oversize_allocations", "oversize_segments"):
            found |= {f"{row}.{measure}": 0 for measure in ("current", "peak", "allocated", "freed")}
        found["max_split_size"] = -1
        found["num_sync_all_streams"] = self.times_waited
        found["num_alloc_retries"] = self.retries
        found["num_ooms"] = self.out_of_memory_count
        found["num_device_alloc"] = found["segment.all.allocated"]
        found["num_device_free"] = found["segment.all.freed"]
        return dict(sorted(found.items()))

    # -- mechanism; the lock is held ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        freed = self._freed
        while freed:
            self._free_block(freed.popleft())

    def _new_segment(self, size: int, pool: Pool, stream: int) -> Block:
        wanted = segment_size(size)
        if not self.driver.take(wanted):
            self.retries += 1
            self.empty_cache()
            if not self.driver.take(wanted):
                self.out_of_memory_count += 1
                raise OutOfDeviceMemory(wanted)
        segment = Segment(self._next_address, wanted, pool, stream)
        self._next_address += wanted
        segment.first = Block(segment.address, wanted, segment, stream, None, None)
        self._segments[segment.address] = segment
        self.all.reserve(wanted)
        pool.reserve(wanted)
        return segment.first

    def _split(self, block: Block, size: int, pool: Pool, stream: int) -> None:
        after = block.following
        rest = Block(block.address + size, block.size - size, block.segment, stream, block, after)
        if after is not None:
            after.previous = rest
        block.following = rest
        block.size = size
        free = pool.free.get(stream)
        if free is None:
            free = pool.free[stream] = FreeList(pool, self.all)
        free.add(rest)

    def _free_block(self, block: Block) -> None:
        block.segment.pool.give(block.size, block.requested)
        self.all.give(block.size, block.requested)
        if block.uses:
            self._waiting.append((self._ticks, block))
        else:
            self._make_free(block)

    def _make_free(self, block: Block) -> None:
        block.requested, block.uses = 0, None
        pool = block.segment.pool
        free = pool.free.get(block.stream)
        if free is None:
            free = pool.free[block.stream] = FreeList(pool, self.all)
        before, after = block.previous, block.following
        if before is not None and not before.requested:
            free.remove(before)
            before.size += block.size
            before.following = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and not after.requested:
            free.remove(after)
            block.size += after.size
            block.following = following = after.following
            if following is not None:
                following.previous = block
        free.add(block)
