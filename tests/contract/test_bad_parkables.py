"""A parkable that cannot be tested gets one clear answer, and not forty confusing ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_park.contract import Finding, Parkable, Untestable, check
from pytest_park.fakegpu import FakeDevice

from .sick.healthy import Healthy, parkable
from .sick.patient import component
from .sick.sharing import CannotRestore, ParksNothing


def made_by(implementation: type[Healthy], device: FakeDevice) -> Parkable:
    return replace(parkable(implementation, *component(device.device)), fake_device=device)


def healthy(device: FakeDevice) -> Parkable:
    return made_by(Healthy, device)


def only_finding(factory: Callable[[], Parkable]) -> Finding:
    (finding,) = check(factory)
    assert finding.promise == 0
    return finding


def test_a_park_that_does_nothing(fake_device: FakeDevice) -> None:
    finding = only_finding(lambda: made_by(ParksNothing, fake_device))
    assert "park() freed nothing" in finding.seen
    assert "headroom" in finding.seen


def test_a_restore_that_raises(fake_device: FakeDevice) -> None:
    finding = only_finding(lambda: made_by(CannotRestore, fake_device))
    assert "restore() after the first park() raised RuntimeError: this restore always fails" in finding.seen


def test_a_module_without_parameters(fake_device: FakeDevice) -> None:
    finding = only_finding(lambda: Parkable(nn.ReLU(), torch.ones(1), park=lambda: None, restore=lambda: None))
    assert "ReLU has no parameters" in finding.seen


def test_a_module_on_the_host() -> None:
    finding = only_finding(lambda: Parkable(nn.Linear(2, 2), torch.ones(1, 2), park=lambda: None, restore=lambda: None))
    assert "move the module to the accelerator" in finding.seen


def test_inputs_on_the_wrong_device(fake_device: FakeDevice) -> None:
    def make() -> Parkable:
        good = healthy(fake_device)
        return replace(good, example_inputs=good.example_inputs[0].cpu())

    finding = only_finding(make)
    assert "input of shape [4, 16] is on cpu" in finding.seen
    assert "fakegpu:0" in finding.seen


def test_a_random_forward(fake_device: FakeDevice) -> None:
    def make() -> Parkable:
        return replace(healthy(fake_device), forward=lambda module, x: module(x) + torch.randn(1).item())

    assert "the forward is random" in only_finding(make).seen


def test_a_forward_that_raises(fake_device: FakeDevice) -> None:
    def make() -> Parkable:
        return replace(healthy(fake_device), example_inputs=torch.ones(1, 3, device=fake_device.device))

    assert "the forward of the fresh module raised RuntimeError" in only_finding(make).seen


def test_a_module_that_is_not_built_anew(fake_device: FakeDevice) -> None:
    one = healthy(fake_device)
    findings = check(lambda: one)
    assert ["same module again" in finding.seen for finding in findings] == [True]


def test_a_module_without_the_verbs() -> None:
    with pytest.raises(Untestable, match="Linear has no method park_non_layer_weights"):
        Parkable(nn.Linear(2, 2))


def test_something_that_is_no_module() -> None:
    with pytest.raises(Untestable, match="is dict, not a torch.nn.Module"):
        Parkable({})  # type: ignore[arg-type]
