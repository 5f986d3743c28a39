"""What a caching allocator consists of: segments, the blocks in them, and pools with lists of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

from .counts import Counts

ADDRESS_BITS = 48
#: In place of the requested bytes of a block that is address space only: not 0, so that nobody takes it for free.
UNMAPPED = -1


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

    def split(self, size: int) -> Block:
        """Cut the block after *size* bytes; the rest, as a block of its own."""
        after = self.following
        rest = Block(self.address + size, self.size - size, self.segment, self.stream, self, after)
        if after is not None:
            after.previous = rest
        self.following = rest
        self.size = size
        return rest

    def absorb_following(self) -> None:
        """Become one with the block behind."""
        gone = self.following
        assert gone is not None
        self.size += gone.size
        self.following = after = gone.following
        if after is not None:
            after.previous = self


class Segment:
    """What the driver gave in one piece; or, with *granule*, address space in which pieces of that size come and go."""

    __slots__ = ("address", "first", "granule", "left_by_others", "left_by_owner", "pool", "size", "stream")

    def __init__(self, address: int, size: int, pool: Pool, stream: int, granule: int = 0) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.stream = stream
        self.granule = granule
        self.first = Block(address, size, self, stream, None, None)
        #: For the sanitizer: what streams last did with memory of it that is free now (`sanitizer.Access`).
        self.left_by_owner: dict[tuple[int, int, int, bool], Any] = {}
        self.left_by_others: dict[tuple[int, int, int, bool], Any] = {}

    @property
    def expandable(self) -> bool:
        return self.granule > 0

    def blocks(self) -> Iterator[Block]:
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.following

    def mapped_ranges(self) -> list[list[Block]]:
        """The stretches with memory behind them, each as its blocks: a segment of its own in the eyes of a snapshot."""
        ranges: list[list[Block]] = []
        connected = False
        for block in self.blocks():
            if block.requested != UNMAPPED:
                if not connected:
                    ranges.append([])
                ranges[-1].append(block)
            connected = block.requested != UNMAPPED
        return ranges


class FreeList:
    """Free blocks, smallest first, at equal size lowest address first: the order of ``BlockComparatorSize``.

    Size and address are one number, because numbers compare faster than pairs. Sizes are multiples of 512, so that
    there is room for addresses of nine bits more than are shifted.
    """

    __slots__ = ("_blocks", "order")

    def __init__(self) -> None:
        self.order: list[int] = []
        self._blocks: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        return (self._blocks[key] for key in list(self.order))

    def add(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        self._blocks[key] = block
        insort(self.order, key)

    def remove(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        del self._blocks[key]
        del self.order[bisect_left(self.order, key)]

    def take(self, size: int) -> Block | None:
        """The first block of at least *size*, out of the list."""
        place = bisect_left(self.order, size << ADDRESS_BITS)
        return self._blocks.pop(self.order.pop(place)) if place < len(self.order) else None

    def from_size(self, size: int) -> list[Block]:
        """The blocks of at least *size*, in order."""
        return [self._blocks[key] for key in self.order[bisect_left(self.order, size << ADDRESS_BITS) :]]

    def stays_first(self, block: Block, after: Block | None) -> bool:
        """Whether *block*, if it were free and merged with *after*, would be the first of at least its size."""
        order, size = self.order, block.size
        place = bisect_left(order, size << ADDRESS_BITS)
        whole = size
        if after is not None:
            whole += after.size
            if place < len(order) and order[place] == after.size << ADDRESS_BITS | after.address:
                place += 1
        return place == len(order) or order[place] > whole << ADDRESS_BITS | block.address


class Pool(Counts):
    """The blocks of one size class, and the counts of them."""

    __slots__ = ("free", "minimum_rest", "unmapped")

    def __init__(self, minimum_rest: int) -> None:
        super().__init__()
        #: What a block must have left over to be split (``should_split``).
        self.minimum_rest = minimum_rest
        #: Free blocks by stream.
        self.free: dict[int, FreeList] = {}
        #: Address space of expandable segments without memory behind it, by stream.
        self.unmapped: dict[int, list[Block]] = {}

    def free_of(self, stream: int) -> FreeList:
        found = self.free.get(stream)
        if found is None:
            found = self.free[stream] = FreeList()
        return found
