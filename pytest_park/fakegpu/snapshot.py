"""Device memory as a picture: what the allocator holds, as ``torch.cuda.memory._snapshot()`` describes it.

``torch.cuda._memory_viz`` draws it. Traces and stacks are there if they were recorded, see `history`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .allocator import CachingAllocator
from .blocks import Block, Segment
from .history import History

if TYPE_CHECKING:
    from collections.abc import Sequence


def snapshot(allocators: Sequence[CachingAllocator]) -> dict[str, Any]:
    """The segments of the devices, in order of their index; format of ``torch/csrc/cuda/memory_snapshot.cpp``."""
    segments = [
        _segment(index, allocator, segment, blocks)
        for index, allocator in enumerate(allocators)
        for segment in allocator.segments()
        for blocks in segment.mapped_ranges()
    ]
    for index, allocator in enumerate(allocators):
        if allocator.history is not None:
            active = sum(segment["active_size"] for segment in segments if segment["device"] == index)
            allocator.history.note("snapshot", 0, active)
    return {
        "segments": segments,
        "device_traces": [[] if a.history is None else a.history.trace() for a in allocators],
        "allocator_settings": {
            "expandable_segments": any(allocator.expandable_segments for allocator in allocators),
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
        },
        "external_annotations": [],
    }


def _segment(index: int, allocator: CachingAllocator, segment: Segment, of: list[Block]) -> dict[str, Any]:
    waiting = allocator.waiting()
    blocks = [_block(block, waiting, allocator.history) for block in of]
    allocated = [block for block in blocks if block["state"] == "active_allocated"]
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": index,
        "address": of[0].address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": sum(block["size"] for block in allocated),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.pool is allocator.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": blocks,
    }


def _block(block: Block, waiting: set[Block], history: History | None) -> dict[str, Any]:
    state = "active_pending_free" if block in waiting else "active_allocated" if block.requested else "inactive"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": state,
        "frames": [] if history is None else history.frames_of(block),
    }
