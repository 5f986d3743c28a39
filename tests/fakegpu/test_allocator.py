"""The model of the caching allocator keeps the rules of ``c10/cuda/CUDACachingAllocator.cpp``, number by number."""

from __future__ import annotations

import pytest

from pytest_park.fakegpu.allocator import CachingAllocator, OutOfDeviceMemory, rounded, segment_size
from pytest_park.fakegpu.blocks import Block
from pytest_park.fakegpu.driver import Driver
from pytest_park.sizes import KiB, MiB


def an_allocator(total: int = 1024 * MiB) -> CachingAllocator:
    return CachingAllocator(Driver(total))


def layout(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """Of each segment the blocks as (size, in use)."""
    return [[(block.size, bool(block.requested)) for block in segment.blocks()] for segment in allocator.segments()]


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "size"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (1 * MiB, 1 * MiB), (1 * MiB + 1, 1 * MiB + 512)],
)
def test_requests_are_rounded_up_to_512_bytes(requested: int, size: int) -> None:
    assert rounded(requested) == size
    allocator = an_allocator()
    block = allocator.allocate(requested)
    assert (block.size, block.requested) == (size, requested)
    assert (allocator.allocated, allocator.requested) == (size, requested)


@pytest.mark.parametrize(
    ("requested", "segment", "small"),
    [
        (1, 2 * MiB, True),
        (1 * MiB, 2 * MiB, True),
        (1 * MiB + 1, 20 * MiB, False),
        (9 * MiB, 20 * MiB, False),
        (10 * MiB - 512, 20 * MiB, False),
        (10 * MiB - 511, 10 * MiB, False),  # the rounded size decides
        (10 * MiB, 10 * MiB, False),
        (10 * MiB + 1, 12 * MiB, False),
        (21 * MiB, 22 * MiB, False),
        (22 * MiB, 22 * MiB, False),
    ],
)
def test_segments_come_in_the_sizes_of_their_pool(requested: int, segment: int, small: bool) -> None:
    assert segment_size(rounded(requested)) == segment
    allocator = an_allocator()
    allocator.allocate(requested)
    assert allocator.reserved == allocator.driver.taken == segment
    statistics = allocator.statistics()
    assert statistics["reserved_bytes.small_pool.current"] == (segment if small else 0)
    assert statistics["reserved_bytes.large_pool.current"] == (0 if small else segment)


@pytest.mark.parametrize(
    ("requested", "blocks"),
    [
        (512, [(512, True), (2 * MiB - 512, False)]),
        (1 * MiB, [(1 * MiB, True), (1 * MiB, False)]),
        (9 * MiB, [(9 * MiB, True), (11 * MiB, False)]),
        (11 * MiB, [(12 * MiB, True)]),  # a rest of 1 MiB stays with the block
        (11 * MiB - 512, [(11 * MiB - 512, True), (1 * MiB + 512, False)]),
        (22 * MiB, [(22 * MiB, True)]),
    ],
)
def test_what_is_left_of_a_block_is_split_off_where_it_is_worth_it(
    requested: int, blocks: list[tuple[int, bool]]
) -> None:
    allocator = an_allocator()
    allocator.allocate(requested)
    assert layout(allocator) == [blocks]
    assert allocator.allocated == blocks[0][0]


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    allocator = an_allocator()
    blocks = [allocator.allocate(1 * MiB), allocator.allocate(1 * MiB - 512)]
    assert layout(allocator) == [[(1 * MiB, True), (1 * MiB - 512, True), (512, False)]]
    blocks.append(allocator.allocate(1))
    assert layout(allocator) == [[(1 * MiB, True), (1 * MiB - 512, True), (512, True)]]
    assert allocator.reserved == 2 * MiB


# -- reuse ------------------------------------------------------------------------------------------------------------


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = an_allocator()
    sizes = [8 * KiB, 4 * KiB, 16 * KiB]
    blocks: list[Block] = []
    for size in sizes:  # keep them apart, so that they do not merge
        blocks.append(allocator.allocate(size))
        allocator.allocate(512)
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(5 * KiB).address == blocks[0].address
    assert allocator.allocate(4 * KiB).address == blocks[1].address
    assert allocator.allocate(6 * KiB).address == blocks[2].address


def test_of_equal_blocks_the_lowest_address_is_taken() -> None:
    allocator = an_allocator()
    blocks = []
    for _ in range(3):
        blocks.append(allocator.allocate(4 * KiB))
        allocator.allocate(512)
    for block in reversed(blocks):
        allocator.free(block)
    assert [allocator.allocate(4 * KiB).address for _ in range(3)] == [block.address for block in blocks]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1)])
def test_free_neighbours_merge_in_whatever_order_they_come(order: tuple[int, ...]) -> None:
    allocator = an_allocator()
    blocks = [allocator.allocate(4 * MiB) for _ in range(3)]
    assert layout(allocator) == [[(4 * MiB, True)] * 3 + [(8 * MiB, False)]]
    for position in order:
        allocator.free(blocks[position])
    assert layout(allocator) == [[(20 * MiB, False)]]
    assert allocator.allocate(20 * MiB).size == 20 * MiB
    assert allocator.reserved == 20 * MiB


def test_a_live_block_keeps_its_neighbours_apart() -> None:
    allocator = an_allocator()
    blocks = [allocator.allocate(4 * MiB) for _ in range(5)]
    for position in (0, 1, 3):
        allocator.free(blocks[position])
    assert layout(allocator) == [[(8 * MiB, False), (4 * MiB, True), (4 * MiB, False), (4 * MiB, True)]]
    allocator.allocate(9 * MiB)  # 12 MiB are free, but not in one piece
    assert allocator.reserved == 40 * MiB


def test_memory_stays_reserved_after_it_is_freed() -> None:
    allocator = an_allocator()
    allocator.free(allocator.allocate(30 * MiB))
    assert (allocator.allocated, allocator.reserved, allocator.driver.free) == (0, 30 * MiB, 994 * MiB)
    allocator.allocate(25 * MiB)
    assert allocator.reserved == 30 * MiB


def test_small_requests_never_use_large_segments_nor_the_other_way_round() -> None:
    allocator = an_allocator()
    allocator.free(allocator.allocate(5 * MiB))
    allocator.allocate(1 * MiB)
    assert allocator.reserved == 22 * MiB
    allocator = an_allocator()
    allocator.free(allocator.allocate(512))
    allocator.allocate(1 * MiB + 1)
    assert allocator.reserved == 22 * MiB


def test_streams_do_not_share_free_blocks() -> None:
    allocator = an_allocator()
    allocator.free(allocator.allocate(4 * KiB, stream=1))
    other = allocator.allocate(4 * KiB, stream=2)
    assert allocator.reserved == 4 * MiB
    own = allocator.allocate(4 * KiB, stream=1)
    assert allocator.reserved == 4 * MiB
    assert (own.stream, other.stream) == (1, 2)


# -- shortage ---------------------------------------------------------------------------------------------------------


def test_cached_segments_go_back_before_the_one_retry() -> None:
    allocator = an_allocator(40 * MiB)
    allocator.free(allocator.allocate(20 * MiB))
    kept = allocator.allocate(512)
    assert allocator.reserved == 22 * MiB
    allocator.allocate(30 * MiB)
    assert allocator.reserved == 32 * MiB
    assert (allocator.retries, allocator.out_of_memory_count) == (1, 0)
    assert kept.segment.size == 2 * MiB


def test_no_retry_is_counted_while_the_driver_has_memory() -> None:
    allocator = an_allocator(40 * MiB)
    allocator.free(allocator.allocate(20 * MiB))
    allocator.allocate(20 * MiB)
    assert allocator.retries == 0


def test_when_the_retry_fails_memory_is_out() -> None:
    allocator = an_allocator(40 * MiB)
    live = allocator.allocate(20 * MiB)
    with pytest.raises(OutOfDeviceMemory) as shortage:
        allocator.allocate(21 * MiB)
    assert shortage.value.requested == 22 * MiB
    assert (allocator.retries, allocator.out_of_memory_count) == (1, 1)
    assert (allocator.allocated, allocator.reserved) == (20 * MiB, 20 * MiB)
    allocator.free(live)
    assert allocator.allocate(40 * MiB).size == 40 * MiB


def test_a_segment_that_is_partly_used_does_not_go_back() -> None:
    allocator = an_allocator(40 * MiB)
    first, second = allocator.allocate(5 * MiB), allocator.allocate(5 * MiB)
    allocator.free(first)
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(30 * MiB)  # 35 MiB are not allocated, but 20 of them are in pieces
    assert allocator.reserved == 20 * MiB
    allocator.free(second)
    allocator.allocate(30 * MiB)


def test_exactly_the_last_byte_can_be_had() -> None:
    allocator = an_allocator(64 * MiB)
    allocator.driver.other_process = 24 * MiB
    allocator.allocate(40 * MiB)
    assert allocator.driver.free == 0
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(1)


def test_one_byte_of_another_process_makes_the_difference() -> None:
    allocator = an_allocator(64 * MiB)
    allocator.driver.other_process = 24 * MiB + 1
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(40 * MiB)


def test_the_cap_limits_what_is_reserved_and_the_driver_does_not_show_it() -> None:
    allocator = an_allocator(100 * MiB)
    allocator.driver.cap = 30 * MiB
    live = allocator.allocate(20 * MiB)
    assert allocator.driver.mem_get_info() == (80 * MiB, 100 * MiB)
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(11 * MiB)
    allocator.allocate(10 * MiB)
    allocator.free(live)
    allocator.allocate(20 * MiB)  # from the cache, where the cap has nothing to say
    assert allocator.reserved == 30 * MiB
    allocator.driver.cap = None
    allocator.allocate(70 * MiB)


def test_empty_cache_gives_back_wholly_free_segments_only() -> None:
    allocator = an_allocator()
    whole, part, live = allocator.allocate(30 * MiB), allocator.allocate(5 * MiB), allocator.allocate(5 * MiB)
    allocator.free(whole)
    allocator.free(part)
    assert allocator.reserved == 50 * MiB
    assert allocator.empty_cache() == 30 * MiB
    assert (allocator.allocated, allocator.reserved, allocator.driver.taken) == (5 * MiB, 20 * MiB, 20 * MiB)
    assert allocator.empty_cache() == 0
    allocator.free(live)
    assert allocator.empty_cache() == 20 * MiB
    assert allocator.driver.free == allocator.driver.total
    allocator.allocate(20 * MiB)


# -- streams ----------------------------------------------------------------------------------------------------------


def a_block_in_use_by(allocator: CachingAllocator, *streams: int, size: int = 20 * MiB) -> Block:
    block = allocator.allocate(size)
    block.uses = set(streams)
    return block


def test_a_block_that_another_stream_uses_is_not_reused_before_that_stream_is_done() -> None:
    allocator = an_allocator()
    block = a_block_in_use_by(allocator, 7)
    allocator.free(block)
    assert allocator.allocated == 0
    allocator.allocate(20 * MiB)
    assert allocator.reserved == 40 * MiB
    allocator.stream_reached(8)
    allocator.allocate(20 * MiB)
    assert allocator.reserved == 60 * MiB
    allocator.stream_reached(7)
    assert allocator.allocate(20 * MiB).address == block.address
    assert allocator.reserved == 60 * MiB


def test_a_block_waits_for_all_the_streams_that_use_it() -> None:
    allocator = an_allocator()
    block = a_block_in_use_by(allocator, 1, 2)
    allocator.free(block)
    allocator.stream_reached(1)
    assert allocator.allocate(20 * MiB).address != block.address
    allocator.stream_reached(2)
    assert allocator.allocate(20 * MiB).address == block.address


def test_synchronising_the_device_frees_what_waits() -> None:
    allocator = an_allocator()
    block = a_block_in_use_by(allocator, 1, 2)
    allocator.free(block)
    allocator.device_reached()
    assert allocator.allocate(20 * MiB).address == block.address


def test_a_block_that_waits_does_not_merge() -> None:
    allocator = an_allocator()
    first, second, third = (allocator.allocate(4 * MiB) for _ in range(3))
    second.uses = {1}
    for block in (first, second, third):
        allocator.free(block)
    assert [size for size, _ in layout(allocator)[0]] == [4 * MiB, 4 * MiB, 12 * MiB]
    allocator.device_reached()
    assert layout(allocator) == [[(20 * MiB, False)]]


def test_what_waits_is_active_and_not_allocated() -> None:
    allocator = an_allocator()
    allocator.free(a_block_in_use_by(allocator, 1))
    statistics = allocator.statistics()
    assert statistics["allocated_bytes.all.current"] == 0
    assert statistics["active_bytes.all.current"] == 20 * MiB
    assert statistics["requested_bytes.all.current"] == statistics["requested_bytes.large_pool.current"] == 20 * MiB
    assert (statistics["allocation.all.current"], statistics["active.all.current"]) == (0, 1)
    allocator.device_reached()
    statistics = allocator.statistics()
    assert statistics["active_bytes.all.current"] == statistics["requested_bytes.all.current"] == 0


@pytest.mark.parametrize("how", ["empty_cache", "shortage"])
def test_what_waits_is_waited_for_before_segments_go_back(how: str) -> None:
    """``release_cached_blocks`` begins with ``synchronize_and_free_events``."""
    allocator = an_allocator(30 * MiB)
    allocator.free(a_block_in_use_by(allocator, 1))
    if how == "empty_cache":
        assert allocator.empty_cache() == 20 * MiB
        assert allocator.reserved == 0
    else:
        allocator.allocate(30 * MiB)
        assert allocator.reserved == 30 * MiB
