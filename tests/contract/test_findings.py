"""A finding tells somebody who has not read the contract what is wrong, in bytes and names, and who else met it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pytest_park.contract import Finding, Parkable, check, examine
from pytest_park.contract.registry import all_checks
from pytest_park.fakegpu import FakeDevice

from .sick.healthy import Healthy, parkable
from .sick.idempotence import DropsTheOnlyCopy, RestoresAtTheSecondPark
from .sick.patient import component
from .sick.sharing import IgnoresOtherOwners
from .sick.updates import UsesStaleCopies
from .sick.values import LosesStrides


def findings(implementation: type[Healthy], device: FakeDevice, *only: str) -> list[Finding]:
    def make() -> Parkable:
        return replace(parkable(implementation, *component(device.device)), fake_device=device)

    return check(make, only=only)


def test_lost_weights_are_named_with_their_report(fake_device: FakeDevice) -> None:
    text = str(findings(DropsTheOnlyCopy, fake_device, "c05")[0])
    assert "C5 is broken: parking again keeps the memory free and loses nothing" in text
    assert "0.weight" in text
    assert "shape [16, 16] became [0]" in text
    assert "https://github.com/sgl-project/sglang/issues/38166" in text
    assert "history:  park -> headroom" in text


def test_memory_that_comes_back_is_counted_in_bytes(fake_device: FakeDevice) -> None:
    text = str(findings(RestoresAtTheSecondPark, fake_device, "c05")[0])
    assert "1,760 more" in text


def test_a_lost_update_is_told_from_a_wrong_value(fake_device: FakeDevice) -> None:
    finding = next(one for one in findings(UsesStaleCopies, fake_device, "c11") if "LoRA" in one.check)
    assert "undone: the value from before the write is back" in finding.seen


def test_it_says_when_it_is_about_another_module_than_theirs(fake_device: FakeDevice) -> None:
    about = {finding.check: finding.module for finding in findings(LosesStrides, fake_device, "c01_every")}
    transposed = "not yours, but a small one with transposed weights, made parkable by Parkable(adopt=...)"
    assert about["c01_every_tensor_comes_back_as_it_was[transposed weights]"] == transposed
    assert [finding.module for finding in findings(DropsTheOnlyCopy, fake_device, "c05")] == [""] * 6
    (shared,) = {finding.module for finding in findings(IgnoresOtherOwners, fake_device, "c36")}
    assert shared == "not yours, but a small one of the check's own, made parkable by Parkable(adopt=...)"


@pytest.mark.parametrize("one", [one for one in all_checks() if one.promise], ids=lambda one: one.id)
def test_every_check_says_what_usually_causes_it_and_who_met_it(one) -> None:
    assert one.cause
    assert one.reports
    assert all(len(report.split("/")) == 4 and report.split("/")[3].isdigit() for report in one.reports)


def test_a_torch_without_distributed_has_no_dtensors(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    verdicts = examine(lambda: parkable(Healthy, *component(fake_device.device)), only=["c39"])
    (dtensor,) = [verdict for verdict in verdicts if "DTensor" in verdict.check]
    assert dtensor.outcome == "not applicable"
    assert dtensor.reason == "this build of torch has no torch.distributed, and so no DTensor"
    assert [verdict.outcome for verdict in verdicts if verdict is not dtensor] == ["kept", "kept"]


def test_a_family_is_examined_by_its_name(fake_device: FakeDevice) -> None:
    def make() -> Parkable:
        return replace(parkable(DropsTheOnlyCopy, *component(fake_device.device)), fake_device=fake_device)

    verdicts = examine(make, only=["idempotence"])
    assert {verdict.outcome for verdict in verdicts} == {"kept", "broken"}
