"""What one stage of a request cost, measured from outside the pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from park_core import ComponentResidencyManager, ParkReport, RestoreReport
from pytest_park.fakegpu import FakeDevice


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage, from before its component was restored until after the component was parked (or kept).

    All sizes are bytes; ``streamed`` is what went to the device besides the restore: layers, and the stage's inputs.
    """

    name: str
    component: str
    seconds: float
    peak: int
    streamed: int
    restored: RestoreReport | None
    parked: ParkReport | None
    completed: bool


class StageLog:
    """Observes the stages of a pipeline on a fake card, and appends them to ``stages`` as they end."""

    def __init__(self, gpu: FakeDevice, residency: ComponentResidencyManager, stages: list[Stage]) -> None:
        self.stages = stages
        self._gpu = gpu
        self._residency = residency

    @contextmanager
    def __call__(self, stage: str, component: str) -> Iterator[None]:
        """Record what happens inside, also when it fails."""
        gpu, reports_before, transfers_before = self._gpu, len(self._residency.reports), len(self._gpu.transfers)
        gpu.mark(stage)
        gpu.reset_peak()
        completed, started = False, time.perf_counter()
        try:
            yield
            completed = True
        finally:
            seconds = time.perf_counter() - started
            reports = self._residency.reports[reports_before:]
            restored = next((r for r in reports if isinstance(r, RestoreReport)), None)
            parked = next((r for r in reports if isinstance(r, ParkReport)), None)
            to_device = sum(t.bytes for t in gpu.transfers[transfers_before:] if t.kind == "h2d")
            self.stages.append(
                Stage(
                    name=stage,
                    component=component,
                    seconds=seconds,
                    peak=gpu.peak_allocated,
                    streamed=to_device - (restored.bytes_to_device if restored else 0),
                    restored=restored,
                    parked=parked,
                    completed=completed,
                )
            )
