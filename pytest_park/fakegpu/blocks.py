"""What a caching allocator consists of: segments, the blocks in them, lists of free blocks, and what it counts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_ADDRESS_BITS = 48


class Block:
    """A stretch of a segment; *requested* is 0 while it is free, *uses* are the other streams that work on it."""

    __slots__ = ("address", "following", "previous", "requested", "segment", "size", "stream", "uses")

    def __init__(
        self, address: int, size: int, segment: Segment, stream: int, previous: Block | None, following: Block | None
    ) -> None:
        self.address = address
        self.size = size
        self.segment = segment
        self.stream = stream
        self.previous = previous
        self.following = following
        self.requested = 0
        self.uses: set[int] | None = None


@dataclass(eq=False, slots=True)
class Segment:
    """What the driver gave in one piece."""

    address: int
    size: int
    pool: Pool
    stream: int
    first: Block = field(init=False)
    #: For the sanitizer: what streams last did with memory of it that is free now (`sanitizer.Access`).
    left_by_owner: dict[tuple[int, int, int, bool], Any] = field(default_factory=dict)
    left_by_others: dict[tuple[int, int, int, bool], Any] = field(default_factory=dict)

    def blocks(self) -> Iterator[Block]:
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.following


class FreeList:
    """Free blocks, smallest first, at equal size lowest address first: the order of ``BlockComparatorSize``.

    Size and address are one number, because numbers compare faster than pairs.
    """

    __slots__ = ("_blocks", "_order", "_pools")

    def __init__(self, *pools: Pool) -> None:
        self._pools = pools
        self._order: list[int] = []
        self._blocks: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, block: Block) -> None:
        key = block.size << _ADDRESS_BITS | block.address
        self._blocks[key] = block
        insort(self._order, key)
        if block.previous is not None or block.following is not None:
            for pool in self._pools:
                pool.leave_unused(block.size)

    def remove(self, block: Block) -> None:
        key = block.size << _ADDRESS_BITS | block.address
        self._taken(self._blocks.pop(key))
        del self._order[bisect_left(self._order, key)]

    def _taken(self, block: Block) -> Block:
        if block.previous is not None or block.following is not None:
            for pool in self._pools:
                pool.unused -= 1
                pool.unused_size -= block.size
        return block

    def take(self, size: int) -> Block | None:
        """The first block of at least *size*, out of the list."""
        place = bisect_left(self._order, size << _ADDRESS_BITS)
        return self._taken(self._blocks.pop(self._order.pop(place))) if place < len(self._order) else None


class Pool:
    """The counts of one pool as ``torch.cuda.memory_stats`` has them: what is there, how much it ever was at once, and
    all that came. What was freed is what came and is not there."""

    __slots__ = (
        "already_there",
        "blocks",
        "blocks_came",
        "blocks_peak",
        "free",
        "minimum_rest",
        "requested",
        "requested_came",
        "requested_peak",
        "reserved",
        "reserved_came",
        "reserved_peak",
        "segments",
        "segments_came",
        "segments_peak",
        "size",
        "size_came",
        "size_peak",
        "unused",
        "unused_came",
        "unused_peak",
        "unused_size",
        "unused_size_came",
        "unused_size_peak",
    )  # fmt: skip

    #: torch's name of each row
    ROWS = (
        ("allocation", "blocks"), ("allocated_bytes", "size"), ("requested_bytes", "requested"),
        ("segment", "segments"), ("reserved_bytes", "reserved"),
        ("inactive_split", "unused"), ("inactive_split_bytes", "unused_size"),
    )  # fmt: skip

    def __init__(self, minimum_rest: int) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)
        self.minimum_rest = minimum_rest
        self.free = {}
        self.already_there = {}

    #: Free blocks by stream; each list is sorted by size, then address (``BlockComparatorSize``), in one number.
    free: dict[int, FreeList]
    #: What there was when the accumulated counts were last reset, by row.
    already_there: dict[str, int]
    #: What a block must have left over to be split (``should_split``).
    minimum_rest: int
    blocks: int
    blocks_peak: int
    blocks_came: int
    size: int
    size_peak: int
    size_came: int
    requested: int
    requested_peak: int
    requested_came: int
    segments: int
    segments_peak: int
    segments_came: int
    reserved: int
    reserved_peak: int
    reserved_came: int
    unused: int
    unused_came: int
    unused_peak: int
    unused_size: int
    unused_size_came: int
    unused_size_peak: int

    def take(self, size: int, requested: int) -> None:
        """One block more. Written out, because every operator pays for it twice."""
        self.blocks_came += 1
        self.size_came += size
        self.requested_came += requested
        self.blocks = blocks = self.blocks + 1
        self.size = size = self.size + size
        self.requested = requested = self.requested + requested
        if size > self.size_peak:
            self.size_peak = size
        if blocks > self.blocks_peak:
            self.blocks_peak = blocks
        if requested > self.requested_peak:
            self.requested_peak = requested

    def give(self, size: int, requested: int) -> None:
        self.blocks -= 1
        self.size -= size
        self.requested -= requested

    def leave_unused(self, size: int) -> None:
        """A free block more that is a part of a segment of which other parts may be in use (``inactive_split``)."""
        self.unused_came += 1
        self.unused_size_came += size
        self.unused = unused = self.unused + 1
        self.unused_size = size = self.unused_size + size
        if unused > self.unused_peak:
            self.unused_peak = unused
        if size > self.unused_size_peak:
            self.unused_size_peak = size

    def reserve(self, size: int) -> None:
        self.segments += 1
        self.segments_came += 1
        self.segments_peak = max(self.segments_peak, self.segments)
        self.reserved += size
        self.reserved_came += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def unreserve(self, size: int) -> None:
        self.segments -= 1
        self.reserved -= size

    def reset_peaks(self) -> None:
        for _, name in self.ROWS:
            setattr(self, f"{name}_peak", getattr(self, name))

    def reset_accumulated(self) -> None:
        for _, name in self.ROWS:
            setattr(self, f"{name}_came", 0)
            self.already_there[name] = getattr(self, name)

    def rows(self) -> dict[str, dict[str, int]]:
        """By torch's names: ``{"allocated_bytes": {"current": …, "peak": …, "allocated": …, "freed": …}, …}``."""
        found = {}
        for row, name in self.ROWS:
            current, peak, came = (getattr(self, f"{name}{kind}") for kind in ("", "_peak", "_came"))
            freed = came + self.already_there.get(name, 0) - current
            found[row] = {"current": current, "peak": peak, "allocated": came, "freed": freed}
        return found
