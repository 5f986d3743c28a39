"""Runs as text: one sentence and one table each."""

from __future__ import annotations

import torch

from examples.video_pipeline.runs import MiB, Run
from examples.video_pipeline.stages import Stage

_COLUMNS = ("stage", "seconds", "peak", "headroom", "decision", "parked", "moved by parking", "streamed in")


def mib(size: float) -> str:
    """``size`` bytes in MiB; in a smaller or larger unit only where MiB would not tell."""
    if size == 0:
        return "0"
    if size < 1024:
        return f"{size:.0f} B"
    if size < MiB / 10:
        return f"{size / 1024:.1f} KiB"
    return f"{size / MiB:.1f} MiB" if size < 1024 * MiB else f"{size / 1024 / MiB:.1f} GiB"


def table(run: Run) -> str:
    """A row per stage; below it, why each component was parked or kept."""
    rows = [_COLUMNS, *(_row(stage) for stage in run.stages)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    reasons = [
        f"{stage.component}: {stage.parked.decision.verdict}, {stage.parked.decision.reason}"
        for stage in run.stages
        if stage.parked
    ]
    return "\n".join([*lines, *reasons])


def _row(stage: Stage) -> tuple[str, ...]:
    parked, restored = stage.parked, stage.restored
    moved = (parked.bytes_to_host if parked else 0) + (restored.bytes_to_device if restored else 0)
    headroom = parked.decision.headroom if parked else None
    return (
        stage.name,
        f"{stage.seconds:.2f}",
        mib(stage.peak),
        mib(headroom.bytes) if headroom else "-",
        (parked.decision.verdict if parked else "-") if stage.completed else "OUT OF MEMORY",
        mib(parked.bytes_freed) if parked else "-",
        mib(moved),
        mib(stage.streamed),
    )


def sentence(run: Run, large: Run) -> str:
    """What happened in ``run``, compared with the same request on a large card."""
    card = f"On a card of {mib(run.card)} {'with' if run.parking else 'without'} parking: "
    return card + (_failure(run) if run.out_of_memory else _success(run, large))


def _failure(run: Run) -> str:
    failed, error = run.failed_stage, run.out_of_memory
    assert error is not None
    if failed is None:
        needed = sum(run.non_layer_weights.values())
        return f"the non-layer weights alone, {mib(needed)}, do not fit, so that the first stage could not begin."
    what = f"{failed.name} ran out of memory. It wanted {mib(error.asked)} more when {mib(error.free)} were free"
    if error.asked > error.free:
        what += f", {mib(error.asked - error.free)} too few"
    if run.parking:
        return f"{what}. Parking is not enough here: all that it can take away are weights of idle components."
    idle = {name: size for name, size in run.non_layer_weights.items() if name != failed.component}
    lay_there = f"{mib(sum(idle.values()))} of weights of {' and '.join(idle)}"
    return f"{what}, while {lay_there}, which it never touches, lay on the card."


def _success(run: Run, large: Run) -> str:
    assert run.frames is not None
    freed = sum(stage.parked.bytes_freed for stage in run.stages if stage.parked)
    parked = f"{mib(freed)} of weights were parked" if freed else "nothing was parked"
    if freed and not sum(stage.parked.bytes_to_host for stage in run.stages if stage.parked):
        parked += ", and none had to be copied, because the host still had them"
    most = f"{run.hungriest_stage.name} needed most, {mib(run.hungriest_stage.peak)}"
    after = f"{mib(run.live_after)} stay allocated after the request"
    return f"done; {_same_frames(run, large)}{parked}; {most}; {after}."


def _same_frames(run: Run, large: Run) -> str:
    if run is large or large.frames is None:
        return ""
    if torch.equal(run.frames, large.frames):
        return "the frames equal those of the large card bit for bit; "
    return "BUT THE FRAMES DIFFER FROM THOSE OF THE LARGE CARD; "
