"""Device memory as a picture: what the allocator holds, as ``torch.cuda.memory._snapshot()`` describes it.

``torch.cuda._memory_viz`` draws it. The history of allocations (``device_traces``) is not recorded and therefore empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .allocator import CachingAllocator
from .blocks import Block, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence


def snapshot(allocators: Sequence[CachingAllocator]) -> dict[str, Any]:
    """The segments of the devices, in order of their index; format of ``torch/csrc/cuda/memory_snapshot.cpp``."""
    return {
        "segments": [
            _segment(index, allocator, segment)
            for index, allocator in enumerate(allocators)
            for segment in allocator.segments()
        ],
        "device_traces": [[] for _ in allocators],
        "allocator_settings": {"expandable_segments": False, "max_split_size": -1, "garbage_collection_threshold": 0.0},
        "external_annotations": [],
    }


def _segment(index: int, allocator: CachingAllocator, segment: Segment) -> dict[str, Any]:
    waiting = allocator.waiting()
    blocks = [_block(block, waiting) for block in segment.blocks()]
    allocated = [block for block in blocks if block["state"] == "active_allocated"]
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": index,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block["size"] for block in allocated),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.pool is allocator.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(block: Block, waiting: set[Block]) -> dict[str, Any]:
    state = "active_pending_free" if block in waiting else "active_allocated" if block.requested else "inactive"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": state,
        "frames": [],
    }
