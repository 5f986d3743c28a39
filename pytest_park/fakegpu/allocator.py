"""A model of CUDA's caching allocator for one device: how many bytes are allocated, reserved, and when it runs out.

It keeps addresses and sizes, no data. The rules and the constants are those of ``c10/cuda/CUDACachingAllocator.cpp``
(torch 2.13): requests are rounded to 512 bytes; requests up to 1 MiB come from 2 MiB segments of the small pool, larger
ones up to 10 MiB from 20 MiB segments of the large pool, still larger ones get a segment of their own rounded to 2 MiB;
the smallest free block that fits is taken and split; free neighbours merge; segments stay reserved after their blocks
are freed; before an allocation fails, all free segments go back to the driver and it is tried once more. What is
different with the setting ``expandable_segments`` stands in `expandable`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from . import expandable
from .blocks import Block, Pool, Segment
from .counts import Counts, statistics

if TYPE_CHECKING:
    from .driver import Driver
    from .history import Action, History

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

    def __init__(self, driver: Driver, *, expandable_segments: bool = False) -> None:
        self.driver = driver
        self.small, self.large = Pool(MIN_BLOCK), Pool(SMALL_REQUEST + 1)
        self._all = Counts()
        #: How many allocations there were so far.
        self.allocations = 0
        self.history: History | None = None
        self._lock = threading.RLock()
        self._freed: deque[Block] = deque()
        #: Give a block back; safe at any point of any thread, because it only queues it.
        self.free = self._freed.append
        self._waiting: list[tuple[int, Block]] = []  # freed at a tick, but another stream may still work on them
        self._ticks = 0
        self._segments: dict[int, Segment] = {}
        self._next_address = FIRST_ADDRESS
        self._plain = True
        self._expandable_segments = False
        self.expandable_segments = expandable_segments
        self.reset_accumulated()

    # -- the hot path -------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """A block for *nbytes* (> 0) on *stream*; raises `OutOfDeviceMemory`."""
        with self._lock:
            size = (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK
            pool = self.small if size <= SMALL_REQUEST else self.large
            freed = self._freed
            if freed:
                if len(freed) == 1:
                    block = freed[0]
                    if block.size == size and block.stream == stream and self._comes_back(block, nbytes, pool):
                        freed.popleft()
                        return block
                self._settle()
            free = pool.free.get(stream)
            if self._plain:
                taken = free.take(size) if free is not None else None
            else:
                taken = expandable.take_free(self, size, pool, stream)
            block = taken if taken is not None else self._new_block(size, pool, stream)
            if block.size - size >= pool.minimum_rest:
                self._split(block, size, pool)
            else:
                size = block.size
                if block.previous is not None or block.following is not None:
                    self._count_unused(block, -1, -size)
            block.requested = nbytes
            pool.blocks_came += 1
            pool.size_came += size
            pool.requested_came += nbytes
            pool.blocks = blocks = pool.blocks + 1
            pool.size = in_use = pool.size + size
            pool.requested = requested = pool.requested + nbytes
            if in_use > pool.size_peak:
                pool.size_peak = in_use
            if blocks > pool.blocks_peak:
                pool.blocks_peak = blocks
            if requested > pool.requested_peak:
                pool.requested_peak = requested
            everything, other = self._all, self.large if pool is self.small else self.small
            if in_use + other.size > everything.size_peak:
                everything.size_peak = in_use + other.size
            if blocks + other.blocks > everything.blocks_peak:
                everything.blocks_peak = blocks + other.blocks
            if requested + other.requested > everything.requested_peak:
                everything.requested_peak = requested + other.requested
            self.allocations += 1
            if self.history is not None:
                self.history.allocated(block)
            return block

    def _comes_back(self, block: Block, nbytes: int, pool: Pool) -> bool:
        """Whether *block*, the only one that was freed since the last allocation, is at once what the next one gets.

        Most operators ask for what the one before gave back. Then nothing is merged, searched and split again; the
        counts move as if it were.
        """
        before, after = block.previous, block.following
        if not self._plain or block.uses or (before is not None and not before.requested):
            return False
        rest = after if after is not None and not after.requested else None
        free = pool.free.get(block.stream)
        if free is not None and not free.stays_first(block, rest):
            return False
        if before is None and rest is not None and rest.following is None:
            pool.unused_came += 1  # the segment was whole for a moment
            pool.unused_size_came += rest.size
        elif before is not None or after is not None:
            blocks = 0 if rest is not None else 1
            self._count_unused(block, blocks, block.size)
            pool.unused -= blocks
            pool.unused_size -= block.size
        self.allocations += 1
        pool.blocks_came += 1
        pool.size_came += block.size
        pool.requested_came += nbytes
        pool.requested = requested = pool.requested + nbytes - block.requested
        block.requested = nbytes
        if requested > pool.requested_peak:
            pool.requested_peak = requested
        requested += (self.large if pool is self.small else self.small).requested
        if requested > self._all.requested_peak:
            self._all.requested_peak = requested
        return True

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
        return self.small.size + self.large.size

    @property
    def requested(self) -> int:
        """Bytes in use as they were asked for, without rounding."""
        self.settle()
        return self.small.requested + self.large.requested

    @property
    def reserved(self) -> int:
        """Bytes that the driver gave and has not got back (``memory_reserved``)."""
        return self.small.reserved + self.large.reserved

    @property
    def all(self) -> Counts:
        """The counts of both pools together."""
        with self._lock:
            self._settle()
            for _, name in Counts.ROWS:
                for kind in ("", "_came"):
                    both = getattr(self.small, name + kind) + getattr(self.large, name + kind)
                    setattr(self._all, name + kind, both)
            return self._all

    @property
    def expandable_segments(self) -> bool:
        """Whether new memory comes from expandable segments; what there is stays as it is when that changes."""
        return self._expandable_segments

    @expandable_segments.setter
    def expandable_segments(self, on: bool) -> None:
        with self._lock:
            self._expandable_segments = on
            self.large.minimum_rest = MIN_BLOCK if on else SMALL_REQUEST + 1  # should_split
            self._see_if_plain()

    def record(self, history: History | None) -> None:
        """Note every step in *history* from now on, or stop doing so."""
        with self._lock:
            self._settle()
            self.history = history
            self.free = self._freed.append if history is None else self._free_noted
            self._see_if_plain()

    def settle(self) -> None:
        """Put all queued frees in order."""
        with self._lock:
            self._settle()

    def empty_cache(self) -> int:
        """Give wholly free segments back to the driver, and free pages of expandable ones; the bytes given back."""
        with self._lock:
            self.times_waited += 1
            self.device_reached()  # synchronize_and_free_events: what waits for a stream is waited for
            given = 0
            for segment in list(self._segments.values()):
                if segment.first.following is None and not segment.first.requested and not segment.expandable:
                    segment.pool.free[segment.stream].remove(segment.first)
                    self.drop(segment)
                    self.reserved_less("segment_free", segment.address, segment.size, segment.pool, segment.stream)
                    given += segment.size
            return given if self._plain else given + expandable.release(self)

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
        for counts in (self.all, self.small, self.large):
            counts.reset_peaks()

    def reset_accumulated(self) -> None:
        for counts in (self.all, self.small, self.large):
            counts.reset_accumulated()
        self.retries = self.out_of_memory_count = self.times_waited = self.times_taken = self.times_given = 0

    def statistics(self) -> dict[str, Any]:
        """The keys of ``torch.cuda.memory_stats``."""
        return statistics(self)

    # -- segments; the lock is held -----------------------------------------------------------------------------------

    def granule_of(self, pool: Pool) -> int:
        """In what sizes memory comes into and leaves an expandable segment of *pool*."""
        return SMALL_SEGMENT if pool is self.small else LARGE_SEGMENT

    def new_address_space(self, size: int, pool: Pool, stream: int, granule: int = 0) -> Segment:
        segment = Segment(self._next_address, size, pool, stream, granule)
        self._next_address += size
        self._segments[segment.address] = segment
        return segment

    def drop(self, segment: Segment) -> None:
        del self._segments[segment.address]

    def reserved_more(
        self, action: Action, address: int, size: int, pool: Pool, stream: int, *, segments: int = 1
    ) -> None:
        """The driver has given *size* bytes."""
        pool.reserve(size, segments)
        everything = self._all
        everything.reserved_peak = max(everything.reserved_peak, self.reserved)
        everything.segments_peak = max(everything.segments_peak, self.small.segments + self.large.segments)
        self.times_taken += 1
        if self.history is not None:
            self.history.note(action, address, size, stream, self.history.called())

    def reserved_less(
        self, action: Action, address: int, size: int, pool: Pool, stream: int, *, segments: int = 1
    ) -> None:
        """*size* bytes go back to the driver."""
        self.driver.give_back(size)
        pool.unreserve(size, segments)
        self.times_given += 1
        if self.history is not None:
            self.history.note(action, address, size, stream, self.history.called())

    def _see_if_plain(self) -> None:
        """The short cuts of the hot path know neither a history nor expandable segments."""
        some = self._expandable_segments or any(segment.expandable for segment in self._segments.values())
        self._plain = self.history is None and not some

    def _new_block(self, size: int, pool: Pool, stream: int) -> Block:
        block = self._from_driver(size, pool, stream)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._from_driver(size, pool, stream)
        if block is None:
            self.out_of_memory_count += 1
            if self.history is not None:
                self.history.note("oom", self.driver.free, size, stream, self.history.called())
            raise OutOfDeviceMemory(segment_size(size))
        return block

    def _from_driver(self, size: int, pool: Pool, stream: int) -> Block | None:
        wanted = segment_size(size)
        if self._expandable_segments:  # the cap is asked for what a segment of its own would take
            return expandable.grow(self, size, pool, stream) if self.driver.allows(wanted) else None
        if not self.driver.take(wanted):
            return None
        segment = self.new_address_space(wanted, pool, stream)
        self.reserved_more("segment_alloc", segment.address, wanted, pool, stream)
        return segment.first

    # -- blocks; the lock is held -------------------------------------------------------------------------------------

    def _free_noted(self, block: Block) -> None:
        history = self.history
        if history is not None:
            history.free_called(block)
        self._freed.append(block)

    def _settle(self) -> None:
        freed = self._freed
        while freed:
            self._free_block(freed.popleft())

    def _split(self, block: Block, size: int, pool: Pool) -> None:
        was_split = block.previous is not None or block.following is not None
        rest = block.split(size)
        pool.free_of(block.stream).add(rest)
        if was_split:
            self._count_unused(block, 0, -size)
        else:
            self._count_unused(block, 1, rest.size)

    def _free_block(self, block: Block) -> None:
        pool = block.segment.pool
        pool.blocks -= 1
        pool.size -= block.size
        pool.requested -= block.requested
        if self.history is not None:
            self.history.freed(block, "free_requested")
        if block.uses:
            self._waiting.append((self._ticks, block))
        else:
            self._make_free(block)

    def _make_free(self, block: Block) -> None:
        if self.history is not None:
            self.history.freed(block, "free_completed")
        block.requested, block.uses = 0, None
        free = block.segment.pool.free_of(block.stream)
        before, after = block.previous, block.following
        blocks, size = 0, block.size
        if before is not None and not before.requested:
            free.remove(before)
            before.absorb_following()
            block = before
            blocks -= 1
        if after is not None and not after.requested:
            free.remove(after)
            block.absorb_following()
            blocks -= 1
        free.add(block)
        if block.previous is not None or block.following is not None:
            self._count_unused(block, blocks + 1, size)
        elif blocks:
            self._count_unused(block, blocks, size - block.size)

    def _count_unused(self, block: Block, blocks: int, size: int) -> None:
        """So many free parts of segments more, which cannot go back to the driver (``inactive_split``); those of
        expandable segments can."""
        segment = block.segment
        if segment.granule:
            return
        pool = segment.pool
        pool.unused += blocks
        pool.unused_size += size
        everything = self._all
        if blocks > 0:
            pool.unused_came += blocks
            if pool.unused > pool.unused_peak:
                pool.unused_peak = pool.unused
            if self.small.unused + self.large.unused > everything.unused_peak:
                everything.unused_peak = self.small.unused + self.large.unused
        if size > 0:
            pool.unused_size_came += size
            if pool.unused_size > pool.unused_size_peak:
                pool.unused_size_peak = pool.unused_size
            if self.small.unused_size + self.large.unused_size > everything.unused_size_peak:
                everything.unused_size_peak = self.small.unused_size + self.large.unused_size
