"""The same request on a large card, and on a small one without and with parking."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from examples.video_pipeline.components import ModelSizes, build_components
from examples.video_pipeline.pipeline import VideoPipeline, VideoRequest
from examples.video_pipeline.stages import Stage, StageLog
from park_core import OffloadConfig, PerformanceMode
from pytest_park.fakegpu import MemorySample, activate

MiB = 1024**2

#: A card on which there is room for everything at once.
LARGE_CARD = "24 GiB"


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """What torch said when an allocation failed; ``asked`` and ``free`` are bytes, as exactly as it says."""

    message: str
    asked: int
    free: int

    @classmethod
    def from_message(cls, message: str) -> OutOfMemory:
        """Read the sizes out of the message of a ``torch.OutOfMemoryError``, CUDA's or the fake card's."""
        asked = re.search(r"Tried to allocate ([\d.]+) (B|bytes|KiB|MiB|GiB)", message)
        free = re.search(r"of which ([\d.]+) (B|bytes|KiB|MiB|GiB) is free", message)
        if asked is None or free is None:
            raise ValueError(f"not the message of an allocation that failed: {message}")
        units = {"B": 1, "bytes": 1, "KiB": 1024, "MiB": MiB, "GiB": 1024 * MiB}
        asked_bytes, free_bytes = (round(float(found[1]) * units[found[2]]) for found in (asked, free))
        return cls(message=message, asked=asked_bytes, free=free_bytes)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one request did on one card. Sizes are bytes, times are seconds since the card was there.

    Either ``frames`` or ``out_of_memory`` is None. ``live_after`` are the bytes that tensors hold on the card when the
    request is over, ``to_host`` all that went to the host until then. ``marks`` are the moments at which stages began.
    ``layer_weights``, ``non_layer_weights`` and ``buffers`` are sizes by component.
    """

    card: int
    parking: bool
    stages: tuple[Stage, ...]
    frames: torch.Tensor | None
    out_of_memory: OutOfMemory | None
    live_after: int
    to_host: int
    layer_weights: Mapping[str, int]
    non_layer_weights: Mapping[str, int]
    buffers: Mapping[str, int]
    memory_log: tuple[MemorySample, ...]
    marks: tuple[tuple[float, str], ...]

    @property
    def failed_stage(self) -> Stage | None:
        """The stage that ran out of memory; None if none did, or if the weights did not even fit before the first."""
        return next((stage for stage in self.stages if not stage.completed), None)

    @property
    def hungriest_stage(self) -> Stage:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    def stage(self, name: str) -> Stage:
        """The stage called ``name``; ``KeyError`` if the request did not come that far."""
        return {stage.name: stage for stage in self.stages}[name]


def run(
    memory: int | str, request: VideoRequest, *, parking: Literal["auto", "never"], sizes: ModelSizes | None = None
) -> Run:
    """Build the pipeline for a fresh card with that much ``memory`` and let it answer ``request`` once."""
    components = build_components(sizes)
    weights = components.weight_bytes
    buffers = {name: sum(b.nbytes for b in module.buffers()) for name, module in components.modules.items()}
    config = OffloadConfig(performance_mode=PerformanceMode.MEMORY, parking=parking)
    stages: list[Stage] = []
    frames, out_of_memory = None, None
    with activate(memory=memory) as gpu:
        gpu.record_memory(True)
        gpu.mark("place")
        try:
            pipeline = VideoPipeline(components, gpu.device, config)
            pipeline.observe = StageLog(gpu, pipeline.residency, stages)
            frames = pipeline(request)
        except torch.OutOfMemoryError as error:
            out_of_memory = OutOfMemory.from_message(str(error))  # the error itself would keep tensors on the device
        gpu.mark("idle")
        return Run(
            card=gpu.memory,
            parking=parking != "never",
            stages=tuple(stages),
            frames=frames,
            out_of_memory=out_of_memory,
            live_after=gpu.requested,
            to_host=sum(transfer.bytes for transfer in gpu.transfers if transfer.kind == "d2h"),
            layer_weights={name: in_layers for name, (in_layers, _) in weights.items()},
            non_layer_weights={name: others for name, (_, others) in weights.items()},
            buffers=buffers,
            memory_log=tuple(gpu.memory_log),
            marks=tuple(gpu.marks),
        )


def just_too_small(large: Run) -> int:
    """Bytes of a card that cannot hold what was live at the peak of ``large``, but almost.

    Cards come in steps of 2 MiB, because the allocator takes memory from the driver in such steps.
    """
    return (large.hungriest_stage.peak - 1) // (2 * MiB) * (2 * MiB)


def make_repeatable() -> None:
    """Make runs comparable bit for bit: with one thread, sums are always taken in the same order."""
    torch.set_num_threads(1)
