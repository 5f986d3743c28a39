"""Snapshots have the format of ``torch.cuda.memory._snapshot()``, so torch's own viewer draws them."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.cuda import _memory_viz

from pytest_park.fakegpu import FakeDevice
from pytest_park.sizes import KiB, MiB


def test_a_snapshot_shows_segments_and_their_blocks(fake_device: FakeDevice) -> None:
    small = torch.empty(1000, dtype=torch.uint8, device="fakegpu")
    large = torch.empty(3 * MiB, dtype=torch.uint8, device="fakegpu")
    first, second = fake_device.snapshot()["segments"]
    assert (first["segment_type"], first["total_size"], first["requested_size"]) == ("small", 2 * MiB, 1000)
    assert (second["segment_type"], second["total_size"], second["allocated_size"]) == ("large", 20 * MiB, 3 * MiB)
    assert [(b["size"], b["requested_size"], b["state"]) for b in first["blocks"]] == [
        (KiB, 1000, "active_allocated"),
        (2 * MiB - KiB, 0, "inactive"),
    ]
    assert first["blocks"][1]["address"] == first["address"] + KiB
    assert small.nbytes + large.nbytes == 1000 + 3 * MiB


def test_its_sums_are_those_of_the_device(fake_device: FakeDevice) -> None:
    kept = [torch.empty(size, dtype=torch.uint8, device="fakegpu") for size in (1, 700, 5 * MiB, 30 * MiB)]
    del kept[1]
    segments = fake_device.snapshot()["segments"]
    assert sum(segment["total_size"] for segment in segments) == fake_device.reserved
    assert sum(segment["allocated_size"] for segment in segments) == fake_device.allocated
    assert sum(segment["requested_size"] for segment in segments) == fake_device.requested
    assert all(sum(b["size"] for b in segment["blocks"]) == segment["total_size"] for segment in segments)


def test_memory_that_waits_for_a_stream_is_shown_so(fake_device: FakeDevice) -> None:
    tensor, side = torch.empty(20 * MiB, dtype=torch.uint8, device="fakegpu"), torch.fakegpu.Stream()
    tensor.record_stream(side)
    del tensor
    (segment,) = fake_device.snapshot()["segments"]
    assert [b["state"] for b in segment["blocks"]] == ["active_pending_free"]
    assert (segment["allocated_size"], segment["active_size"]) == (0, 20 * MiB)


@pytest.mark.fake_device(count=2)
def test_segments_name_their_device(fake_device: FakeDevice) -> None:
    kept = [torch.ones(4, device=card.device) for card in fake_device.devices]
    assert [segment["device"] for segment in fake_device.snapshot()["segments"]] == [0, 1]
    assert len(kept) == 2


def test_torchs_viewer_draws_it(fake_device: FakeDevice) -> None:
    kept = [torch.empty(size * MiB, dtype=torch.uint8, device="fakegpu") for size in (1, 3, 30)]
    snapshot = pickle.loads(pickle.dumps(fake_device.snapshot()))  # it travels as a file
    drawn = _memory_viz.segsum(snapshot)
    assert "segments: 3" in drawn
    assert "total_reserved: 52.0MiB" in drawn
    assert "total_allocated: 34.0MiB" in drawn
    for plot in (_memory_viz.segment_plot, _memory_viz.trace_plot):
        assert "MemoryViz.js" in plot(snapshot)
    assert len(kept) == 3
