"""What a person sees who runs ``python -m examples.video_pipeline``."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.video_pipeline import __main__ as program
from examples.video_pipeline.runs import LARGE_CARD
from examples.video_pipeline.tests.small_pipeline import REQUEST, SIZES, run_once


@pytest.fixture(autouse=True)
def each_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "run", run_once)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "memory.png"


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_it_tells_the_story_and_draws_it(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.show(REQUEST, memory=None, out=out, sizes=SIZES) == 0
    said = words(capsys)
    assert "24.0 GiB with parking: done; nothing was parked; decode needed most" in said
    assert "without parking: decode ran out of memory. It wanted" in said
    assert "with parking: done; the frames equal those of the large card bit for bit;" in said
    assert "of weights were parked, and none had to be copied, because the host still had them" in said
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_card_with_room_needs_no_parking(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.show(REQUEST, memory=LARGE_CARD, out=out, sizes=SIZES) == 0
    assert "This card has room without parking; try --memory" in words(capsys)


@pytest.mark.parametrize(
    ("memory", "why"),
    [("20 MiB", "do not fit, so that the first stage could not begin"), ("98 MiB", "Parking is not enough here")],
)
def test_a_card_that_is_too_small_even_with_parking(
    memory: str, why: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.show(REQUEST, memory=memory, out=out, sizes=SIZES) == 1
    assert why in words(capsys)
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("memory", ["12 gigs", "a lot", "0", "-4 MiB", "12 GB"])
def test_a_size_that_makes_no_sense_is_refused_before_anything_is_built(
    memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        program.main([f"--memory={memory}"])
    assert refused.value.code == 2
    message = capsys.readouterr().err
    assert "argument --memory" in message
    assert memory in message


@pytest.mark.parametrize("picture", ["no/such/folder/memory.png", "memory.jpeg"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_built(
    picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        program.main(["--out", picture])
    assert refused.value.code == 2
    assert "ends in .png in a folder that exists" in capsys.readouterr().err
