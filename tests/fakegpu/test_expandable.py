"""Expandable segments: one for each stream and pool grows, and gives back whole pages wherever they are free."""

from __future__ import annotations

import random

import pytest
import torch

from pytest_park.fakegpu import FakeDevice, activate
from pytest_park.fakegpu.allocator import CachingAllocator, OutOfDeviceMemory
from pytest_park.fakegpu.blocks import UNMAPPED, Block
from pytest_park.fakegpu.driver import Driver
from pytest_park.sizes import GiB, MiB

from .test_allocator_books import assert_sound


def an_allocator(total: int = 1024 * MiB, *, expandable_segments: bool = True) -> CachingAllocator:
    return CachingAllocator(Driver(total), expandable_segments=expandable_segments)


def layout(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """Of each stretch with memory behind it the blocks as (MiB, in use)."""
    return [
        [(block.size // MiB, block.requested > 0) for block in blocks]
        for segment in allocator.segments()
        for blocks in segment.mapped_ranges()
    ]


@pytest.mark.parametrize(("request_", "granule"), [(512, 2), (1 * MiB, 2), (1 * MiB + 1, 20), (30 * MiB, 20)])
def test_a_segment_grows_in_granules_of_its_pool(request_: int, granule: int) -> None:
    allocator = an_allocator()
    blocks: list[Block] = []
    while len(blocks) < 2 or blocks[-1].address < blocks[0].address + 3 * granule * MiB:
        blocks.append(allocator.allocate(request_))
        in_use = blocks[-1].address + blocks[-1].size - blocks[0].address
        assert allocator.reserved == allocator.driver.taken == -(-in_use // (granule * MiB)) * granule * MiB
        assert blocks[-1].address == blocks[0].address + (len(blocks) - 1) * blocks[0].size
    (segment,) = allocator.segments()
    assert segment.size == 1024 * MiB * 9 // 8 + -(1024 * MiB * 9 // 8) % (granule * MiB)


def test_each_stream_and_each_pool_has_its_segment() -> None:
    allocator = an_allocator()
    for stream in (0, 1):
        allocator.allocate(512, stream)
        allocator.allocate(30 * MiB, stream)
    assert layout(allocator) == [[(0, True), (1, False)], [(30, True), (10, False)]] * 2
    assert [segment.stream for segment in allocator.segments()] == [0, 0, 1, 1]


def test_pieces_too_small_for_a_segment_add_up() -> None:
    """Eight times 11 MiB take eight segments of 12 MiB, and no ninth fits into 100 MiB; or 100 MiB of one segment."""
    for expandable_segments in (False, True):
        allocator = an_allocator(100 * MiB, expandable_segments=expandable_segments)
        for _ in range(8):
            allocator.allocate(11 * MiB)
        if expandable_segments:
            allocator.allocate(12 * MiB)
            assert layout(allocator) == [[(11, True)] * 8 + [(12, True)]]
        else:
            with pytest.raises(OutOfDeviceMemory):
                allocator.allocate(12 * MiB)
        assert allocator.allocated == (100 if expandable_segments else 96) * MiB


def test_free_pages_go_back_from_the_end_and_from_the_middle_and_the_gap_is_filled_first() -> None:
    allocator = an_allocator()
    first, middle, last = (allocator.allocate(size * MiB) for size in (20, 40, 20))
    allocator.free(middle)
    assert allocator.empty_cache() == 40 * MiB
    assert allocator.reserved == allocator.driver.taken == 40 * MiB
    assert layout(allocator) == [[(20, True)], [(20, True)]]
    assert allocator.allocate(30 * MiB).address == middle.address
    assert layout(allocator) == [[(20, True), (30, True), (10, False), (20, True)]]
    allocator.free(last)
    assert allocator.empty_cache() == 20 * MiB
    assert layout(allocator) == [[(20, True), (30, True), (10, False)]]
    assert first.requested == 20 * MiB


def test_only_whole_pages_go_back() -> None:
    allocator = an_allocator()
    kept, gone = allocator.allocate(10 * MiB), allocator.allocate(35 * MiB)
    assert layout(allocator) == [[(10, True), (35, True), (15, False)]]
    allocator.free(gone)
    assert allocator.empty_cache() == 40 * MiB
    assert layout(allocator) == [[(10, True), (10, False)]]
    allocator.free(kept)
    assert allocator.empty_cache() == 20 * MiB
    assert allocator.segments() == []
    assert allocator.driver.taken == 0


def test_a_shortage_takes_free_pages_from_another_stream() -> None:
    allocator = an_allocator(100 * MiB)
    allocator.free(allocator.allocate(60 * MiB, stream=1))
    allocator.allocate(60 * MiB, stream=2)
    assert (allocator.retries, allocator.out_of_memory_count, allocator.reserved) == (1, 0, 60 * MiB)
    with pytest.raises(OutOfDeviceMemory) as shortage:
        allocator.allocate(41 * MiB, stream=2)
    assert shortage.value.requested == 42 * MiB
    assert (allocator.retries, allocator.out_of_memory_count, allocator.reserved) == (2, 1, 60 * MiB)
    assert allocator.allocate(40 * MiB, stream=2).size == 40 * MiB


def test_the_cap_is_asked_for_what_a_segment_of_its_own_would_take() -> None:
    """``alloc_block`` compares the cap with the size of a plain segment, and maps whole pages then."""
    allocator = an_allocator(100 * MiB)
    allocator.driver.cap = 30 * MiB
    allocator.allocate(30 * MiB)
    assert allocator.reserved == 40 * MiB
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(11 * MiB)


def test_the_growing_end_is_left_alone_while_something_else_fits() -> None:
    allocator = an_allocator()
    gap, _, _ = allocator.allocate(15 * MiB), allocator.allocate(5 * MiB), allocator.allocate(10 * MiB)
    allocator.free(gap)
    assert layout(allocator) == [[(15, False), (5, True), (10, True), (10, False)]]
    assert allocator.allocate(8 * MiB).address == gap.address


def test_a_rest_of_512_bytes_is_split_off() -> None:
    allocator = an_allocator()
    allocator.allocate(20 * MiB - 512)
    (segment,) = allocator.segments()
    assert [block.size for block in segment.mapped_ranges()[0]] == [20 * MiB - 512, 512]


def test_what_waits_for_a_stream_is_neither_used_nor_given_back() -> None:
    allocator = an_allocator()
    block = allocator.allocate(20 * MiB)
    block.uses = {7}
    allocator.free(block)
    assert allocator.allocate(20 * MiB).address == block.address + 20 * MiB
    allocator.stream_reached(7)
    assert allocator.allocate(20 * MiB).address == block.address


def test_the_statistics_count_pages_and_no_segments() -> None:
    allocator = an_allocator()
    blocks = [allocator.allocate(30 * MiB), allocator.allocate(30 * MiB), allocator.allocate(512)]
    allocator.free(blocks[0])
    statistics = allocator.statistics()
    expected = {
        "segment.all.current": 0,
        "reserved_bytes.all.current": 62 * MiB,
        "reserved_bytes.large_pool.peak": 60 * MiB,
        "inactive_split.all.current": 0,
        "inactive_split_bytes.all.current": 0,
        "num_device_alloc": 3,
        "num_device_free": 0,
    }
    assert {key: statistics[key] for key in expected} == expected
    allocator.empty_cache()
    assert allocator.statistics()["num_device_free"] == 1
    assert allocator.statistics()["reserved_bytes.all.freed"] == 20 * MiB


def test_turned_off_its_blocks_stay_and_are_given_to_nobody() -> None:
    allocator = an_allocator()
    live, gone = allocator.allocate(15 * MiB), allocator.allocate(25 * MiB)
    allocator.free(gone)
    allocator.expandable_segments = False
    plain = allocator.allocate(22 * MiB)
    assert not plain.segment.expandable
    assert allocator.reserved == 62 * MiB
    allocator.expandable_segments = True
    assert allocator.allocate(20 * MiB).address == gone.address
    assert live.requested == 15 * MiB


@pytest.mark.parametrize("seed", range(5))
def test_the_books_balance_after_any_sequence(seed: int) -> None:
    chance = random.Random(seed)
    allocator = an_allocator(200 * MiB)
    live: list[Block] = []
    for step in range(2000):
        what = chance.random()
        if what < 0.5:
            size = chance.choice([1, 512, 4096, 700 * 1024, 1 * MiB, 3 * MiB, 10 * MiB, 25 * MiB])
            try:
                live.append(allocator.allocate(chance.randint(1, size), stream=chance.randint(0, 2)))
            except OutOfDeviceMemory:
                assert allocator.driver.free < 60 * MiB
        elif what < 0.95 and live:
            allocator.free(live.pop(chance.randrange(len(live))))
        elif what < 0.96:
            allocator.expandable_segments = not allocator.expandable_segments
        else:
            allocator.empty_cache()
        if step % 50 == 0:
            assert_sound(allocator, live)
            unmapped = sorted(
                block.address
                for segment in allocator.segments()
                for block in segment.blocks()
                if block.requested == UNMAPPED
            )
            known = [
                b.address for pool in (allocator.small, allocator.large) for bs in pool.unmapped.values() for b in bs
            ]
            assert unmapped == sorted(known)
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert_sound(allocator, [])
    assert (allocator.reserved, layout(allocator)) == (0, [])


# -- how it is asked for ----------------------------------------------------------------------------------------------


def reserved_for_30_mib() -> int:
    tensor = torch.empty(30 * MiB, dtype=torch.uint8, device="fakegpu")
    return torch.fakegpu.memory_reserved() // MiB * tensor.element_size()


@pytest.mark.fake_device(expandable_segments=True)
def test_by_the_mark_and_a_snapshot_shows_it(fake_device: FakeDevice) -> None:
    tensor = torch.empty(30 * MiB, dtype=torch.uint8, device="fakegpu")
    gone = torch.empty(30 * MiB, dtype=torch.uint8, device="fakegpu")
    last = torch.empty(20 * MiB, dtype=torch.uint8, device="fakegpu")
    del gone
    torch.fakegpu.empty_cache()
    snapshot = fake_device.snapshot()
    assert snapshot["allocator_settings"]["expandable_segments"] is True
    first, second = snapshot["segments"]
    assert [b["size"] // MiB for b in first["blocks"]] == [30, 10]
    assert [(b["state"], b["size"] // MiB) for b in second["blocks"]] == [("active_allocated", 20)]
    assert (first["is_expandable"], first["total_size"]) == (True, 40 * MiB)
    assert second["address"] == first["address"] + 60 * MiB
    assert fake_device.reserved == 60 * MiB
    assert len(tensor) + len(last) == 50 * MiB


def test_by_argument_environment_and_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with activate("1 GiB"):
        assert reserved_for_30_mib() == 30
        torch.fakegpu.memory._set_allocator_settings("expandable_segments:True")
        torch.fakegpu.empty_cache()
        assert reserved_for_30_mib() == 40
    with activate("1 GiB"):
        assert reserved_for_30_mib() == 30
    with activate("1 GiB", expandable_segments=True):
        assert reserved_for_30_mib() == 40
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with activate("1 GiB"):
        assert reserved_for_30_mib() == 40
    with activate("1 GiB", expandable_segments=False):
        assert reserved_for_30_mib() == 30
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    with activate("1 GiB"):
        assert reserved_for_30_mib() == 30


def test_what_the_model_does_not_have_is_refused_or_from_the_environment_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with activate("1 GiB"):
        with pytest.raises(NotImplementedError, match="max_split_size_mb:128"):
            torch.fakegpu.memory._set_allocator_settings("expandable_segments:True, max_split_size_mb:128")
        assert reserved_for_30_mib() == 30
        with pytest.raises(ValueError, match="True or False; got 'expandable_segments:yes'"):
            torch.fakegpu.memory._set_allocator_settings("expandable_segments:yes")
    with (
        pytest.raises(ValueError, match="expandable_segments is True, False or None"),
        activate(
            "1 GiB",
            expandable_segments="yes",  # type: ignore[arg-type]
        ),
    ):
        pass
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments:True")
    with pytest.warns(UserWarning, match="does not have garbage_collection_threshold:0.8"), activate("1 GiB"):
        assert reserved_for_30_mib() == 40
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:1")
    with (
        pytest.raises(ValueError, match="PYTORCH_ALLOC_CONF in the environment: expandable_segments"),
        activate("1 GiB"),
    ):
        pass
    assert not torch.fakegpu.is_available()


@pytest.mark.fake_device(memory="8 GiB", expandable_segments=True)
def test_running_out_is_as_without(fake_device: FakeDevice) -> None:
    fake_device.other_process = 7 * GiB
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1.20 GiB"):
        torch.empty(int(1.2 * GiB), dtype=torch.uint8, device="fakegpu")
    assert fake_device.reserved == 0
    assert torch.empty(GiB - 20 * MiB, dtype=torch.uint8, device="fakegpu").numel() == GiB - 20 * MiB
