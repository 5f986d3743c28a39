"""Device memory over time, without and with parking, as a picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.video_pipeline.runs import MiB, Run
from examples.video_pipeline.table import mib

matplotlib.use("Agg")

_STAGES = {"place": "#ececec", "text-encode": "#fdeccf", "denoise": "#edf4fa", "decode": "#e9f4e4"}
_ALLOCATED, _RESERVED, _PARKED, _CAPACITY = "#6f94bf", "#c7d6e8", "#1b5e20", "#b3261e"


def draw(large: Run, without: Run, with_parking: Run, path: Path) -> None:
    """Write a PNG to ``path``: one panel per run on the small card.

    Where the first one ran out of memory, a line shows how the same request goes on on the large card.
    """
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(f"One request, one card of {mib(with_parking.card)}", fontsize=14)
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    end = max(run.memory_log[-1].seconds for run in (without, with_parking))
    for panel, run, title in ((upper, without, "Without parking"), (lower, with_parking, "With parking")):
        panel.set_title(title, loc="left")
        panel.set_ylabel("MiB on the device")
        _memory(panel, run)
        if run.out_of_memory:
            _out_of_memory(panel, run)
            if run is without:
                end = max(end, _rest_on_a_large_card(panel, run, large))
        panel.axhline(
            run.card / MiB, color=_CAPACITY, linewidth=1.5, linestyle="--", label=f"capacity: {mib(run.card)}"
        )
        panel.legend(loc="upper left", ncols=4, framealpha=1)
        _parked(panel, run)
    for panel, run in ((upper, without), (lower, with_parking)):
        _stages(panel, run, total=end)
    most = large.hungriest_stage.peak
    highest = max(most, with_parking.card) if with_parking.card < 2 * most else most
    upper.set_ylim(0, highest / MiB * 1.3)
    upper.set_xlim(0, end)
    lower.set_xlabel("seconds")
    figure.savefig(path, dpi=110)


def _memory(panel: Axes, run: Run) -> None:
    seconds = [sample.seconds for sample in run.memory_log]
    for label, colour in (("reserved", _RESERVED), ("allocated", _ALLOCATED)):
        sizes = [getattr(sample, label) / MiB for sample in run.memory_log]
        panel.fill_between(seconds, sizes, step="post", color=colour, linewidth=0, label=label)


def _stages(panel: Axes, run: Run, *, total: float) -> None:
    for (start, stage), (end, _) in pairwise(run.marks):
        panel.axvspan(start, end, color=_STAGES[stage], linewidth=0, zorder=0)
        panel.axvline(end, color="white", linewidth=0.8)
        if end - start > total / 90:
            upright = end - start < total / 12
            panel.text((start + end) / 2, 5, stage, ha="center", va="bottom", fontsize=9, rotation=90 * upright)


def _parked(panel: Axes, run: Run) -> None:
    """At the end of a stage, how much memory parking its component gave back."""
    ends = {stage: end for (_, stage), (end, _) in pairwise(run.marks)}
    height = 0.87 * run.card / MiB
    for stage in run.stages:
        if stage.completed and stage.parked and stage.parked.bytes_freed:
            end, last = ends[stage.name], stage is run.stages[-1]
            panel.annotate(
                f"{mib(stage.parked.bytes_freed)} of\n{stage.component} parked",
                (end, height),
                xytext=(-6 if last else 6, 0),
                textcoords="offset points",
                ha="right" if last else "left",
                fontsize=9,
                color=_PARKED,
            )
            panel.plot(end, height, marker="v", color=_PARKED, markersize=7, clip_on=False, zorder=4)


def _rest_on_a_large_card(panel: Axes, run: Run, large: Run) -> float:
    """Draw how ``large`` went on from the allocation that failed in ``run``; the time at which the line ends."""
    # The two did the same until there, but not at the same speed: the place is found by counting, not by the clock.
    stage, failed_at = run.marks[-2][1], run.marks[-1][0]
    done = sum(run.marks[-2][0] <= sample.seconds < failed_at for sample in run.memory_log)
    begin = {label: seconds for seconds, label in large.marks}[stage]
    rest = [sample for sample in large.memory_log if sample.seconds >= begin][done:]
    seconds = [sample.seconds - rest[0].seconds + failed_at for sample in rest]
    sizes = [sample.allocated / MiB for sample in rest]
    panel.step(seconds, sizes, where="post", color="black", linewidth=0.8, label="allocated from here on a large card")
    return seconds[-1]


def _out_of_memory(panel: Axes, run: Run) -> None:
    """A cross where the allocation that failed would have taken the card."""
    error = run.out_of_memory
    assert error is not None
    seconds, reached = run.marks[-1][0], (run.card - error.free + error.asked) / MiB
    panel.plot(seconds, reached, marker="X", markersize=12, color=_CAPACITY, markeredgecolor="white", zorder=5)
    panel.annotate(
        f"out of memory: wanted {mib(error.asked)}, {mib(error.free)} free",
        (seconds, reached),
        xytext=(10, 6),
        textcoords="offset points",
        color=_CAPACITY,
        va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
