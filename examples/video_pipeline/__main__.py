"""Show it: ``python -m examples.video_pipeline [--memory "220 MiB"] [--out memory.png]``."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from pathlib import Path

import torch

from examples.video_pipeline import picture
from examples.video_pipeline.components import ModelSizes
from examples.video_pipeline.pipeline import VideoRequest
from examples.video_pipeline.runs import LARGE_CARD, MiB, Run, just_too_small, make_repeatable, run
from examples.video_pipeline.table import sentence, table
from pytest_park.fakegpu import activate

REQUEST = VideoRequest(
    prompt="A red fox trots through fresh snow at dawn, its breath visible in the cold air.",
    negative_prompt="Blurry, overexposed, static, subtitles, watermark.",
)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and show the story; the exit code of the program."""
    options = _options(arguments)
    make_repeatable()
    return show(REQUEST, memory=options.memory, out=options.out)


def show(request: VideoRequest, *, memory: str | int | None, out: Path, sizes: ModelSizes | None = None) -> int:
    """Answer the request on a large card, then on one of ``memory`` bytes without and with parking, and report.

    Returns 0 if it fits with parking and its frames are those of the large card, else 1.
    """
    started = time.perf_counter()
    print(f"{request.prompt}\n{request.frames} frames of {request.width} x {request.height}, {request.steps} steps.")
    large = run(LARGE_CARD, request, parking="auto", sizes=sizes)
    memory = memory or just_too_small(large)
    _report(large, large)
    without = run(memory, request, parking="never", sizes=sizes)
    _report(without, large)
    with_parking = run(memory, request, parking="auto", sizes=sizes)
    _report(with_parking, large)
    picture.draw(large, without, with_parking, out)
    print(f"\nDevice memory over time: {out} ({time.perf_counter() - started:.0f} s in all)")
    if without.frames is not None:
        print(f"This card has room without parking; try --memory '{just_too_small(large) // MiB} MiB'.")
    if with_parking.frames is None or large.frames is None:
        return 1
    return 0 if torch.equal(with_parking.frames, large.frames) else 1


def _report(what: Run, large: Run) -> None:
    print(f"\n{textwrap.fill(sentence(what, large), 110)}\n\n{textwrap.indent(table(what), '    ')}")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.video_pipeline",
        description="A text-to-video pipeline on a fake card: out of memory without parking, done with it.",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of the small card, such as '220 MiB' (default: a few MiB less than is needed without parking)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("memory.png"), help="picture to write (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.memory is not None:
        try:
            with activate(memory=options.memory):
                pass
        except ValueError as error:
            parser.error(f"argument --memory: {error}")
    if options.out.suffix != ".png" or not options.out.absolute().parent.is_dir():
        parser.error(f"argument --out: needs a file name that ends in .png in a folder that exists, got {options.out}")
    return options


if __name__ == "__main__":
    sys.exit(main())
