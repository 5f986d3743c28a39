"""What happens in the child process of a dangerous check: its outcome is known here, whatever became of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_park.contract import Parkable, Verdict, child
from pytest_park.contract.case import Case
from pytest_park.contract.examine import judge
from pytest_park.contract.registry import Check
from pytest_park.contract.table import table
from pytest_park.contract.verdict import Broken, NotApplicable
from pytest_park.fakegpu import FakeDevice

from .sick.healthy import Healthy, parkable
from .sick.patient import component


def verdict_on(device: FakeDevice, function: Callable[[Case], Any]) -> Verdict:
    one = Check(7, "a promise", "family", "a_check", function, "a cause", ("a/b/issues/1",), in_child="only")

    def make() -> Parkable:
        return replace(parkable(Healthy, *component(device.device)), fake_device=device)

    return judge(one, None, make)


def test_a_promise_that_is_kept(fake_device: FakeDevice) -> None:
    assert verdict_on(fake_device, Case.cycle).outcome == "kept"


def test_a_finding_with_its_history(fake_device: FakeDevice) -> None:
    def function(case: Case) -> None:
        case.cycle()
        raise Broken(expected="one thing", seen="another", names=["0.weight"])

    finding = verdict_on(fake_device, function).finding
    assert finding is not None
    assert (finding.expected, finding.seen, finding.names) == ("one thing", "another", ("0.weight",))
    assert finding.history == ("park", "restore")


def test_what_does_not_apply(fake_device: FakeDevice) -> None:
    def function(case: Case) -> None:
        raise NotApplicable("no tied weights")

    verdict = verdict_on(fake_device, function)
    assert (verdict.outcome, verdict.reason) == ("not applicable", "no tied weights")


def test_a_crash_is_a_finding_that_names_the_last_step(fake_device: FakeDevice) -> None:
    def function(case: Case) -> None:
        case.park()
        os.kill(os.getpid(), signal.SIGKILL)

    finding = verdict_on(fake_device, function).finding
    assert finding is not None
    assert "it died of SIGKILL" in finding.seen
    assert finding.history == ("park",)


def test_a_long_check_is_no_hang(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PATIENCE", 2)

    def function(case: Case) -> None:
        for number in range(5):
            case.history.append(f"step {number}")
            time.sleep(0.6)

    assert verdict_on(fake_device, function).outcome == "kept"


def test_a_hang_is_neither_kept_nor_broken(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PATIENCE", 1)

    def function(case: Case) -> None:
        case.park()
        while True:
            time.sleep(1)

    verdict = verdict_on(fake_device, function)
    assert verdict.outcome == "hangs"
    text = str(verdict.finding)
    assert "C7 is neither kept nor broken, the check hangs: a promise" in text
    assert "did nothing for 1 seconds; its last step: park" in text
    assert "OMP_NUM_THREADS=1" in text
    assert "HANGS" in table([verdict])


def test_the_child_has_one_thread_and_the_compiler_of_torch(fake_device: FakeDevice) -> None:
    def function(case: Case) -> None:
        import sys

        import torch

        raise NotApplicable(f"{torch.get_num_threads()} {'torch._dynamo' in sys.modules}")

    assert verdict_on(fake_device, function).reason == "1 True"
