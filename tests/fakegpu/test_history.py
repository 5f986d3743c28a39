"""What the allocator did can be recorded, in the format that torch's own viewer draws."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from pytest_park.fakegpu import FakeDevice, memory
from pytest_park.sizes import MiB

pytestmark = pytest.mark.fake_device


def trace() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = memory._snapshot()["device_traces"][0]
    return entries


def steps() -> list[tuple[str, int]]:
    return [(entry["action"], entry["size"]) for entry in trace()]


def an_allocation(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="fakegpu")


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    an_allocation(1000)
    assert trace() == []
    assert memory is torch.fakegpu.memory


def test_every_step_is_recorded_in_order_with_its_bytes(fake_device: FakeDevice) -> None:
    memory._record_memory_history()
    first = an_allocation(1000)
    del first
    second = an_allocation(3 * MiB)
    fake_device.empty_cache()
    assert steps() == [
        ("segment_alloc", 2 * MiB),
        ("alloc", 1000),
        ("free_requested", 1000),
        ("free_completed", 1000),
        ("segment_alloc", 20 * MiB),
        ("alloc", 3 * MiB),
        ("segment_free", 2 * MiB),
        ("snapshot", 3 * MiB),
    ]
    entries = trace()
    (segment,) = memory._snapshot()["segments"]
    assert entries[5]["addr"] == entries[4]["addr"] == segment["address"]
    assert entries[1]["addr"] == entries[2]["addr"] == entries[3]["addr"]
    assert {entry["stream"] for entry in entries} == {0}
    times = [entry["time_us"] for entry in entries]
    assert times == sorted(times)
    assert times[0] > 1e15  # since 1970
    assert len(second) == 3 * MiB


def test_a_block_that_waits_for_a_stream_is_free_later() -> None:
    memory._record_memory_history()
    tensor, side = an_allocation(20 * MiB), torch.fakegpu.Stream()
    tensor.record_stream(side)
    del tensor
    assert [action for action, _ in steps()][-2:] == ["free_requested", "snapshot"]
    side.synchronize()
    assert steps()[-2] == ("free_completed", 20 * MiB)


@pytest.mark.fake_device(memory="40 MiB")
def test_running_out_is_recorded_with_what_was_free() -> None:
    memory._record_memory_history()
    live = an_allocation(30 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        an_allocation(11 * MiB)
    (out_of_memory,) = [entry for entry in trace() if entry["action"] == "oom"]
    assert (out_of_memory["size"], out_of_memory["device_free"]) == (11 * MiB, 10 * MiB)
    assert "addr" not in out_of_memory
    assert len(live) == 30 * MiB


@pytest.mark.fake_device(expandable_segments=True)
def test_pages_of_expandable_segments_are_mapped_and_unmapped(fake_device: FakeDevice) -> None:
    memory._record_memory_history()
    an_allocation(30 * MiB)
    fake_device.empty_cache()
    assert [step for step in steps() if step[0].startswith("segment")] == [
        ("segment_map", 40 * MiB),
        ("segment_unmap", 40 * MiB),
    ]


def names(entry: dict[str, Any]) -> list[str]:
    return [frame["name"] for frame in entry["frames"]]


def test_stacks_tell_who_allocated_and_who_freed() -> None:
    memory._record_memory_history()

    def frees(kept: list[torch.Tensor]) -> None:
        kept.clear()

    kept = [an_allocation(1000)]
    live = an_allocation(2000)
    frees(kept)
    segment, alloc, _, free_requested, free_completed, _ = trace()
    assert names(alloc)[:2] == ["an_allocation", "test_stacks_tell_who_allocated_and_who_freed"]
    assert names(segment)[0] == "an_allocation"
    assert alloc["frames"][0]["filename"] == __file__
    assert names(free_requested)[0] == names(free_completed)[0] == "frees"
    blocks = memory._snapshot()["segments"][0]["blocks"]
    assert [names(block)[:1] for block in blocks if block["state"] == "active_allocated"] == [["an_allocation"]]
    assert len(live) == 2000


def test_what_is_free_has_no_stack(fake_device: FakeDevice) -> None:
    memory._record_memory_history()
    an_allocation(2 * MiB)
    history = fake_device.allocator.history
    (segment,) = memory._snapshot()["segments"]
    assert [(block["state"], block["frames"]) for block in segment["blocks"]] == [("inactive", [])]
    assert history is not None
    assert history._allocated_at == history._freed_at == {}


@pytest.mark.parametrize(
    ("context", "of_blocks", "of_allocations", "of_frees"),
    [(None, [], [], []), ("state", ["f"], [], []), ("alloc", ["f"], ["f"], ["f"]), ("all", ["f"], ["f"], ["g"])],
)
def test_stacks_are_kept_as_far_as_asked(
    context: Any, of_blocks: list[str], of_allocations: list[str], of_frees: list[str]
) -> None:
    memory._record_memory_history(context=context, stacks="python")

    def f() -> torch.Tensor:
        return an_allocation(1000)

    def g() -> None:
        kept.clear()

    live, kept = f(), [f()]
    g()
    actions = {entry["action"]: names(entry) for entry in trace()}
    block = memory._snapshot()["segments"][0]["blocks"][0]
    assert [name for name in names(block) if name in "fg"] == of_blocks
    assert [name for name in actions["alloc"] if name in "fg"] == of_allocations
    assert [name for name in actions["free_requested"] if name in "fg"] == of_frees
    assert len(live) == 1000


def test_the_last_entries_are_kept_and_recording_ends_and_starts_anew() -> None:
    memory._record_memory_history(max_entries=3)
    an_allocation(1000)
    an_allocation(2000)
    assert steps() == [("free_requested", 2000), ("free_completed", 2000), ("snapshot", 0)]
    memory._record_memory_history(max_entries=100)
    an_allocation(3000)
    assert [size for action, size in steps() if action == "free_completed"] == [2000, 3000]
    memory._record_memory_history(clear_history=True)
    assert steps() == [("snapshot", 0)]
    memory._record_memory_history(None)
    an_allocation(1000)
    assert steps() == []


def test_state_keeps_where_live_memory_comes_from_and_no_trace() -> None:
    memory._record_memory_history("state")
    live = an_allocation(1000)
    assert steps() == [("snapshot", 1024)]
    assert names(memory._snapshot()["segments"][0]["blocks"][0])[0] == "an_allocation"
    assert len(live) == 1000


def test_actions_can_be_left_out() -> None:
    memory._record_memory_history(skip_actions=["free_requested", "snapshot", "segment_alloc"])
    an_allocation(1000)
    an_allocation(1000)
    assert steps() == [("alloc", 1000), ("free_completed", 1000)] * 2


@pytest.mark.parametrize("wrong", [{"enabled": "some"}, {"context": "free"}, {"stacks": "c++"}])
def test_what_torch_refuses_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match="expected"):
        memory._record_memory_history(**wrong)


@pytest.mark.fake_device(count=2)
def test_each_device_has_its_trace() -> None:
    memory._record_memory_history()
    torch.ones(10, device="fakegpu:1")
    first, second = memory._snapshot()["device_traces"]
    assert [entry["action"] for entry in first] == ["snapshot"]
    assert ("alloc", 40) in [(entry["action"], entry["size"]) for entry in second]


def test_torchs_viewer_reads_a_dumped_file(tmp_path: Path) -> None:
    memory._record_memory_history()
    live, gone = an_allocation(3 * MiB), an_allocation(5 * MiB)
    del gone
    memory._dump_snapshot(tmp_path / "snapshot.pickle")
    dumped = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "MemoryViz.js" in plot(dumped)
    assert "MemoryViz.js" in _memory_viz.trace_plot(dumped, plot_segments=True)
    told = _memory_viz.trace(dumped)
    assert "b = a[0:3.0MiB]" in told.replace(f"[{0}:", "[0:")
    assert "free completed" in told
    flames = _memory_viz.memory(dumped, format_flamegraph=lambda lines: lines)
    assert "an_allocation" in flames
    left = _memory_viz.filter_alloc_free_pairs(dumped)["device_traces"][0]
    assert [(entry["action"], entry["size"]) for entry in left if entry["action"] == "alloc"] == [("alloc", 3 * MiB)]
    assert len(live) == 3 * MiB


def test_torchs_table_of_the_statistics_is_there() -> None:
    live = an_allocation(3 * MiB)
    table = torch.fakegpu.memory_summary(abbreviated=True)
    assert "Allocated memory      |   3072 KiB" in table
    assert len(live) == 3 * MiB
