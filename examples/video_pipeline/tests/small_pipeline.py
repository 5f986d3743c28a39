"""Models and a video that are small enough for a test, with the proportions of the large ones."""

from __future__ import annotations

from functools import cache

from examples.video_pipeline import runs
from examples.video_pipeline.components import ModelSizes
from examples.video_pipeline.pipeline import VideoRequest

SIZES = ModelSizes(attention_heads=10, ffn_dim=640, blocks=2)
REQUEST = VideoRequest(
    prompt="A red fox in the snow.", negative_prompt="Blurry.", frames=5, height=64, width=64, steps=2
)

#: Like `runs.run`, but each run is done only once: nothing in it can be changed.
run_once = cache(runs.run)
