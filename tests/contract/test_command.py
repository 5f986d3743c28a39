"""``python -m pytest_park.contract module:factory`` for a person: table, diagnoses, and an exit code for scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_park.contract import Parkable
from pytest_park.contract.__main__ import main
from pytest_park.fakegpu import FakeDevice

from .sick.healthy import Healthy, parkable
from .sick.idempotence import DropsTheOnlyCopy
from .sick.patient import component
from .sick.sharing import ParksNothing

no_factory = 3


def healthy(gpu: FakeDevice) -> Parkable:
    return parkable(Healthy, *component(gpu.device))


def sick(gpu: FakeDevice) -> Parkable:
    return parkable(DropsTheOnlyCopy, *component(gpu.device))


def without_effect(gpu: FakeDevice) -> Parkable:
    return parkable(ParksNothing, *component(gpu.device))


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the current folder


def run(*arguments: str) -> int:
    return main([f"{__name__}:{arguments[0]}", *arguments[1:]])


def test_all_promises_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("healthy", "--only", "values", "--only", "c06", "--memory", "256 MiB") == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert total == "36 kept"
    assert lines[0].split(maxsplit=1)[0] == "kept"  # that it can be tested has no number
    assert "  C6  kept              restoring again makes no allocation" in "\n".join(lines)
    assert {line.split()[0] for line in lines[1:]} == {"C1", "C2", "C3", "C4", "C6"}


def test_a_broken_promise_has_a_line_and_a_diagnosis(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sick", "--only", "c05") == 1
    text = capsys.readouterr().out
    assert "  C5  BROKEN 6 of 12" in text
    assert "C5 is broken: parking again keeps the memory free" in text
    assert "sgl-project/sglang/issues/38166" in text
    assert text.splitlines()[-1] == "7 kept, 6 broken"


def test_cases_of_one_check_have_one_diagnosis(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sick", "--only", "c05") == 1
    text = capsys.readouterr().out
    assert text.count("C5 is broken") == text.count("usual cause") == 1
    assert (
        "  also in: 2 parks, ten times the weights; 2 parks, huge headroom; 3 parks, ten times the placeholders; "
        "3 parks, ten times the weights; 3 parks, huge headroom. Seen: the same\n"
    ) in text


def test_brief_leaves_the_diagnoses_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sick", "--only", "c05", "--brief") == 1
    assert "usual cause" not in capsys.readouterr().out


def test_a_parkable_that_cannot_be_tested_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("without_effect", "--brief") == 1
    table, total = capsys.readouterr().out.splitlines()
    assert table.split()[0] == "UNTESTABLE"
    assert total == "1 untestable"


def test_a_word_that_selects_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("healthy", "--only", "c05", "--only", "updating") == 2
    says = capsys.readouterr().err
    assert "no check has 'updating' in its name, and the families are accounting, concurrency, decision" in says


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("no_such_module:factory", "No module named 'no_such_module'"),
        (f"{__name__}:absent", "has no attribute 'absent'"),
        (f"{__name__}:no_factory", "no_factory is not callable"),
        (__name__, "give it as module:factory"),
    ],
)
def test_a_place_that_is_no_good(place: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([place]) == 2
    assert says in capsys.readouterr().err


def test_as_a_program_in_the_folder_of_the_factory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from park_core import OffloadConfig, layerwise_offloadable\n"
        "from pytest_park.contract import Parkable\n"
        "def encoder(gpu):\n"
        "    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).eval()\n"
        "    layerwise_offloadable(module, [], device=gpu.device, config=OffloadConfig(performance_mode='memory'))\n"
        "    return Parkable(module, lambda: torch.ones(2, 8, device=gpu.device))\n"
    )
    command = [sys.executable, "-W", "error", "-m", "pytest_park.contract", "mine:encoder", "--only", "c05"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.splitlines()[-1] == "13 kept"
