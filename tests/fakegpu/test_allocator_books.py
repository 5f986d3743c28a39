"""The books of the allocator: the statistics that torch has, and that they balance whatever happens."""

from __future__ import annotations

import random
import threading

import pytest

from pytest_park.fakegpu.allocator import CachingAllocator, OutOfDeviceMemory
from pytest_park.fakegpu.blocks import UNMAPPED, Block
from pytest_park.fakegpu.driver import Driver
from pytest_park.sizes import KiB, MiB


def an_allocator(total: int = 1024 * MiB) -> CachingAllocator:
    return CachingAllocator(Driver(total))


_ROWS = (
    "allocation", "allocated_bytes", "segment", "reserved_bytes", "active", "active_bytes", "inactive_split",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
_COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)


def test_the_statistics_have_the_keys_of_torch() -> None:
    wanted = {
        f"{row}.{pool}.{measure}"
        for row in _ROWS
        for pool in ("all", "large_pool", "small_pool")
        for measure in ("current", "peak", "allocated", "freed")
    }
    wanted |= set(_COUNTERS)
    wanted |= {
        f"oversize_{what}.{measure}"
        for what in ("allocations", "segments")
        for measure in ("current", "peak", "allocated", "freed")
    }
    assert sorted(wanted - an_allocator().statistics().keys()) == []


def test_the_statistics_count_what_happened() -> None:
    allocator = an_allocator()
    small, large = allocator.allocate(1000), allocator.allocate(3 * MiB)
    allocator.free(small)
    allocator.allocate(11 * MiB)
    statistics = allocator.statistics()
    expected = {
        "allocation.all.current": 2,
        "allocation.all.peak": 2,
        "allocation.all.allocated": 3,
        "allocation.all.freed": 1,
        "allocation.small_pool.current": 0,
        "allocation.small_pool.allocated": 1,
        "allocation.large_pool.current": 2,
        "allocated_bytes.all.current": 14 * MiB,
        "allocated_bytes.all.allocated": 14 * MiB + 1024,
        "allocated_bytes.all.freed": 1024,
        "allocated_bytes.small_pool.peak": 1024,
        "requested_bytes.small_pool.peak": 1000,
        "requested_bytes.all.current": 14 * MiB,
        "segment.all.current": 2,
        "segment.small_pool.current": 1,
        "reserved_bytes.all.current": 22 * MiB,
        "reserved_bytes.large_pool.peak": 20 * MiB,
        "active_bytes.all.current": 14 * MiB,
        "inactive_split.all.current": 1,
        "inactive_split_bytes.all.current": 6 * MiB,
        "inactive_split_bytes.large_pool.current": 6 * MiB,
        "num_device_alloc": 2,
        "num_device_free": 0,
    }
    assert {key: statistics[key] for key in expected} == expected
    allocator.free(large)
    assert allocator.statistics()["inactive_split.all.current"] == 2
    allocator.empty_cache()
    statistics = allocator.statistics()
    assert (statistics["num_device_free"], statistics["segment.all.freed"]) == (1, 1)
    assert statistics["reserved_bytes.all.freed"] == 2 * MiB


def test_inactive_parts_are_counted_by_what_each_step_changes() -> None:
    """``alloc_found_block`` and ``free_block``: a split, a merge and a reuse change the counts by the difference."""
    allocator = an_allocator()
    first = allocator.allocate(5 * MiB)  # a part of 15 MiB is left
    second = allocator.allocate(5 * MiB)  # that part shrinks
    allocator.free(first)  # a second part, of 5 MiB
    rows = ("inactive_split.all", "inactive_split_bytes.all")
    statistics = allocator.statistics()
    measures = ("current", "peak", "allocated", "freed")
    assert [[statistics[f"{row}.{measure}"] for measure in measures] for row in rows] == [
        [2, 2, 2, 0],
        [15 * MiB, 15 * MiB, 20 * MiB, 5 * MiB],
    ]
    allocator.free(second)  # both parts merge with it to a whole segment
    statistics = allocator.statistics()
    assert [[statistics[f"{row}.{measure}"] for measure in measures] for row in rows] == [
        [0, 2, 2, 2],
        [0, 15 * MiB, 20 * MiB, 20 * MiB],
    ]


def test_peaks_start_again_from_what_is_live() -> None:
    allocator = an_allocator()
    live, gone = allocator.allocate(20 * MiB), allocator.allocate(30 * MiB)
    allocator.free(gone)
    allocator.settle()
    statistics = allocator.statistics()
    assert (statistics["allocated_bytes.all.peak"], statistics["reserved_bytes.all.peak"]) == (50 * MiB, 50 * MiB)
    allocator.reset_peaks()
    allocator.empty_cache()
    allocator.reset_peaks()
    statistics = allocator.statistics()
    assert (statistics["allocated_bytes.all.peak"], statistics["reserved_bytes.all.peak"]) == (20 * MiB, 20 * MiB)
    assert statistics["allocated_bytes.all.allocated"] == 50 * MiB
    allocator.allocate(1 * MiB)
    assert allocator.statistics()["allocated_bytes.all.peak"] == 21 * MiB
    assert live.requested


def test_accumulated_counts_start_again_from_nothing() -> None:
    """``Stat::reset_accumulated`` sets both to zero, whatever is live."""
    allocator = an_allocator()
    live = allocator.allocate(20 * MiB)
    allocator.empty_cache()
    assert allocator.statistics()["num_sync_all_streams"] == 1
    allocator.reset_accumulated()
    statistics = allocator.statistics()
    assert (statistics["allocated_bytes.all.allocated"], statistics["allocated_bytes.all.freed"]) == (0, 0)
    assert (statistics["num_alloc_retries"], statistics["num_device_alloc"], statistics["num_sync_all_streams"]) == (
        0,
        0,
        0,
    )
    assert statistics["allocated_bytes.all.current"] == 20 * MiB
    allocator.free(live)
    statistics = allocator.statistics()
    assert (statistics["allocated_bytes.all.allocated"], statistics["allocated_bytes.all.freed"]) == (0, 20 * MiB)


# -- whatever happens -------------------------------------------------------------------------------------------------


def assert_sound(allocator: CachingAllocator, live: list[Block]) -> None:
    """Blocks cover their segments without gaps, no two free neighbours, and every count equals what is there."""
    segments = allocator.segments()
    mapped = [block.size for segment in segments for block in segment.blocks() if block.requested != UNMAPPED]
    assert allocator.reserved == allocator.driver.taken == sum(mapped)
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.requested == sum(block.requested for block in live)
    seen = set()
    for segment in segments:
        address, before = segment.address, 1
        for block in segment.blocks():
            assert block.address == address
            assert before > 0 or before != block.requested  # neighbours of a kind are one
            address, before = address + block.size, block.requested
            seen.add(id(block))
        assert address == segment.address + segment.size
    assert seen >= {id(block) for block in live}
    assert allocator.all.size == allocator.small.size + allocator.large.size
    assert allocator.all.reserved == allocator.small.reserved + allocator.large.reserved
    parts = [
        block.size
        for segment in segments
        for block in segment.blocks()
        if not block.requested
        and not segment.expandable
        and (block.previous is not None or block.following is not None)
    ]
    assert (allocator.all.unused, allocator.all.unused_size) == (len(parts), sum(parts))


@pytest.mark.parametrize("seed", range(5))
def test_the_books_balance_after_any_sequence(seed: int) -> None:
    chance = random.Random(seed)
    allocator = an_allocator(200 * MiB)
    live: list[Block] = []
    for step in range(2000):
        what = chance.random()
        if what < 0.5:
            size = chance.choice([1, 512, 4 * KiB, 700 * KiB, 1 * MiB, 3 * MiB, 10 * MiB, 25 * MiB])
            try:
                live.append(allocator.allocate(chance.randint(1, size), stream=chance.randint(0, 2)))
            except OutOfDeviceMemory:
                assert allocator.driver.free < 52 * MiB
        elif what < 0.97 and live:
            allocator.free(live.pop(chance.randrange(len(live))))
        else:
            allocator.empty_cache()
        if step % 50 == 0:
            assert_sound(allocator, live)
    assert_sound(allocator, live)
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert_sound(allocator, [])
    assert allocator.reserved == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_block_that_comes_back_at_once_is_counted_as_if_it_had_been_merged_searched_and_split(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    quick, slow = an_allocator(300 * MiB), an_allocator(300 * MiB)
    monkeypatch.setattr(slow, "_comes_back", lambda *_: False)
    came_back = []
    monkeypatch.setattr(
        quick, "_comes_back", lambda *a: came_back.append(type(quick)._comes_back(quick, *a)) or came_back[-1]
    )
    live: list[tuple[Block, Block]] = []
    sizes = [100, 512, 700, 4 * KiB, 600 * KiB, MiB + 1, 3 * MiB, 10 * MiB, 12 * MiB]
    for _ in range(1500):
        size, stream = chance.choice(sizes), chance.choice([0, 0, 0, 5])
        if live and chance.random() < 0.55:
            pair = live.pop(chance.randrange(len(live)))
            elsewhere = chance.random() < 0.05
            for allocator, block in zip((quick, slow), pair, strict=True):
                block.uses = {3} if elsewhere else None
                allocator.free(block)
            if chance.random() < 0.7:
                size, stream = max(1, pair[0].requested - chance.choice([0, 1])), pair[0].stream
        if sum(block.size for block, _ in live) < 150 * MiB:
            live.append((quick.allocate(size, stream), slow.allocate(size, stream)))
            assert live[-1][0].address == live[-1][1].address
        if chance.random() < 0.02:
            quick.reset_peaks()
            slow.reset_peaks()
        if chance.random() < 0.2:
            assert quick.statistics() == slow.statistics()
    assert quick.statistics() == slow.statistics()
    assert_sound(quick, [block for block, _ in live])
    assert came_back.count(True) > 50


def test_what_comes_back_at_once_is_seen_beside_a_free_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = an_allocator()
    merged = []
    make_free = allocator._make_free
    monkeypatch.setattr(allocator, "_make_free", lambda block: merged.append(block) or make_free(block))
    for _ in range(3):
        allocator.free(allocator.allocate(1000))
    assert merged == []
    allocator.settle()
    assert len(merged) == 1


def test_ten_threads_lose_no_bytes() -> None:
    allocator = an_allocator()
    kept: list[Block] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        mine: list[Block] = []
        for _ in range(500):
            if mine and chance.random() < 0.5:
                allocator.free(mine.pop())
            else:
                mine.append(allocator.allocate(chance.randint(1, 2 * MiB) if chance.random() < 0.1 else 100))
        kept.extend(mine)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_sound(allocator, kept)
