"""Expandable segments: one segment for each stream and pool that grows, and gives back any page that is free.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.13, "Note [Expandable Segments]"): a segment is
address space for 1 1/8 of the device (``find_expandable_block``); memory is put behind it in granules of 2 MiB for the
small pool and 20 MiB for the large one, at the lowest address where the request fits (``map_block``); and it is taken
away wherever a whole granule is free, in the middle too (``unmap_block``).
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING

from .blocks import UNMAPPED, Block, Pool

if TYPE_CHECKING:
    from .allocator import CachingAllocator

_by_address = attrgetter("address")


def take_free(allocator: CachingAllocator, size: int, pool: Pool, stream: int) -> Block | None:
    """``get_free_block`` where there are expandable segments: best fit, but a block at the growing end of a segment is
    as large as it can become; and none of theirs once the setting is off again."""
    blocks = pool.free_of(stream).from_size(size)
    if not allocator.expandable_segments:
        blocks = [block for block in blocks if not block.segment.expandable]
    if not blocks:
        return None
    chosen, *others = blocks
    for other in others:
        if not chosen.segment.expandable or _could_become(other) >= _could_become(chosen):
            break
        chosen = other
    pool.free_of(stream).remove(chosen)
    return chosen


def _could_become(block: Block) -> int:
    after = block.following
    return block.size + (after.size if after is not None and after.requested == UNMAPPED else 0)


def grow(allocator: CachingAllocator, size: int, pool: Pool, stream: int) -> Block | None:
    """A block of at least *size* with memory put behind it (``try_allocate_expandable_block``), or None."""
    block: Block | None = _place_for(allocator, size, pool, stream)
    assert block is not None
    if block.requested == UNMAPPED:
        block = _map(allocator, block, min(block.size, size))
    while block is not None and block.size < size:
        after = block.following
        assert after is not None
        block = _map(allocator, after, min(size - block.size, after.size))
    if block is not None:
        pool.free_of(stream).remove(block)
    return block


def release(allocator: CachingAllocator) -> int:
    """Take the memory away from every granule that is free; the bytes given back to the driver."""
    free = [block for pool in (allocator.large, allocator.small) for blocks in pool.free.values() for block in blocks]
    return sum(_unmap(allocator, block) for block in free if block.segment.expandable)


def _place_for(allocator: CachingAllocator, size: int, pool: Pool, stream: int) -> Block:
    """The lowest block from which *size* bytes of free blocks and address space follow each other."""
    for unmapped in pool.unmapped.setdefault(stream, []):
        before = unmapped.previous
        first = before if before is not None and before.requested <= 0 else unmapped
        room, block = 0, first
        while room < size and block is not None and block.requested <= 0:
            room, block = room + block.size, block.following  # type: ignore[assignment]
        if room >= size:
            return first
    granule = allocator.granule_of(pool)
    space = -(-(allocator.driver.total * 9 // 8) // granule) * granule
    segment = allocator.new_address_space(space, pool, stream, granule)
    segment.first.requested = UNMAPPED
    insort(pool.unmapped[stream], segment.first, key=_by_address)
    return segment.first


def _map(allocator: CachingAllocator, block: Block, size: int) -> Block | None:
    """Put memory behind the first *size* bytes of *block*, up to a whole granule; the free block that there is then."""
    segment, pool = block.segment, block.segment.pool
    offset = block.address - segment.address + size
    mapped = size + -offset % segment.granule
    if not allocator.driver.take(mapped, within_cap=False):
        return None
    unmapped, free = pool.unmapped[block.stream], pool.free_of(block.stream)
    unmapped.remove(block)
    if mapped < block.size:
        rest = block.split(mapped)
        rest.requested = UNMAPPED
        insort(unmapped, rest, key=_by_address)
    block.requested = 0
    after, before = block.following, block.previous
    if after is not None and not after.requested:
        free.remove(after)
        block.absorb_following()
    if before is not None and not before.requested:
        free.remove(before)
        before.absorb_following()
        block = before
    free.add(block)
    allocator.reserved_more("segment_map", segment.address + offset - size, mapped, pool, block.stream, segments=0)
    return block


def _unmap(allocator: CachingAllocator, block: Block) -> int:
    """Take the memory away from the whole granules within the free *block*."""
    segment, pool = block.segment, block.segment.pool
    start = block.address - segment.address
    before = -start % segment.granule
    taken = (start + block.size) // segment.granule * segment.granule - (start + before)
    if taken <= 0:
        return 0
    unmapped, free = pool.unmapped[block.stream], pool.free_of(block.stream)
    free.remove(block)
    if before:
        rest = block.split(before)
        free.add(block)
        block = rest
    if taken < block.size:
        free.add(block.split(taken))
    address = block.address
    block.requested = UNMAPPED
    if block.following is not None and block.following.requested == UNMAPPED:
        unmapped.remove(block.following)
        block.absorb_following()
    if block.previous is not None and block.previous.requested == UNMAPPED:
        block = block.previous
        unmapped.remove(block)
        block.absorb_following()
    if block.size < segment.size:
        insort(unmapped, block, key=_by_address)
    else:
        allocator.drop(segment)
    allocator.reserved_less("segment_unmap", address, taken, pool, block.stream, segments=0)
    return taken
