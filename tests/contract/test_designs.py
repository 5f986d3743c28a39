"""Ways to park that other projects have chosen: what is harmless in them is no fault, and what is a fault is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pytest_park.contract import Parkable, Verdict
from pytest_park.contract.examine import judge
from pytest_park.contract.probes import batch, linear
from pytest_park.contract.registry import all_checks
from pytest_park.contract.traits import SHARING, SUBCLASS
from pytest_park.contract.verdict import error_text
from pytest_park.fakegpu import FakeDevice

from .sick.patient import component

WHILE = "backward while parked"


def verdict(check_id: str, variant: str | None, parkable: Parkable) -> Verdict:
    (check,) = (check for check in all_checks() if check.id.startswith(check_id))
    return judge(check, variant, lambda: parkable)


def one_element_that_is_nan(device: FakeDevice) -> Parkable:
    """One placeholder of one element, made at the first park and kept; what is in it is not a number."""
    module = nn.Sequential(linear(16, 16, device.device), linear(16, 16, device.device))
    copies: dict[nn.Parameter, torch.Tensor] = {}
    placeholders: list[torch.Tensor] = []

    def park() -> None:
        for weight in module.parameters():
            if weight not in copies:
                copies[weight] = weight.detach().cpu()
                if not placeholders:
                    placeholders.append(torch.full((1,), torch.nan, device=device.device))
                weight.data = placeholders[0]

    def restore() -> None:
        for weight, copy in copies.items():
            weight.data = copy.to(device.device)
        copies.clear()

    return Parkable(module, batch(device.device), park=park, restore=restore, fake_device=device)


def moved_by_a_hook(device: FakeDevice, module: nn.Module | None = None) -> Parkable:
    """Parked by moving the module to the host; a hook of its forward moves it back."""
    module = module or linear(16, 16, device.device)

    def restore(*_: Any) -> None:
        module.to(device.device)

    module.register_forward_pre_hook(restore)
    return Parkable(module, batch(device.device), park=lambda: module.to("cpu"), restore=restore, fake_device=device)


def moved_as_a_whole(
    device: FakeDevice, module: nn.Module | None = None, inputs: Any = None, streamed: Sequence[str] = ()
) -> Parkable:
    """Parked and restored by ``module.to``, which takes the buffers along and makes new tensors for them."""
    module = module or component(device.device)[0].requires_grad_()
    inputs = batch(device.device) if inputs is None else inputs

    def restore() -> None:
        module.to(device.device)

    def adopt(other: nn.Module, arguments: Any, layers: Sequence[str]) -> Parkable:
        return moved_as_a_whole(device, other, arguments, layers)

    return Parkable(module, inputs, park=lambda: module.to("cpu"), restore=restore, streamed=streamed, adopt=adopt)


@pytest.mark.parametrize(
    ("check", "case"), [("c03_", "the module as it is"), ("c32_", None), ("c20_a_parked_module", "LayerNorm")]
)
def test_what_goes_and_comes_back_as_a_whole_is_right(check: str, case: str | None, fake_device: FakeDevice) -> None:
    found = verdict(check, case, moved_as_a_whole(fake_device))
    assert found.outcome == "kept", found.reason


def test_an_error_of_torch_that_does_not_name_the_state_is_told_once(fake_device: FakeDevice) -> None:
    found = verdict("c20_a_parked_module", "the module as it is", moved_as_a_whole(fake_device))
    assert found.reason.startswith("RuntimeError: Expected all tensors to be on the same device")


@pytest.mark.parametrize(
    ("check", "case"), [("c19_", "to(cpu)"), ("c33_a_pending", "backward after restore"), ("c33_a_pending", WHILE)]
)
def test_what_real_weights_on_the_host_cannot_show(check: str, case: str, fake_device: FakeDevice) -> None:
    found = verdict(check, case, moved_as_a_whole(fake_device))
    assert found.outcome == "not applicable"
    assert found.reason.startswith("parked weights are tensors of the host")


def test_a_placeholder_that_is_kept_is_no_growth(fake_device: FakeDevice) -> None:
    found = verdict("c03_", "the module as it is", one_element_that_is_nan(fake_device))
    assert found.outcome == "kept", found.reason


def test_a_checksum_of_a_placeholder_that_is_no_number_is_not_the_truth(fake_device: FakeDevice) -> None:
    assert verdict("c16_", "checksums", one_element_that_is_nan(fake_device)).reason.startswith(
        "sum of 0.weight is nan"
    )


@pytest.mark.parametrize("check", ["c20_a_parked_module", "c20_a_forward"])
def test_a_forward_that_restores_its_weights_is_right(check: str, fake_device: FakeDevice) -> None:
    assert verdict(check, "the module as it is", moved_by_a_hook(fake_device)).outcome == "kept"


def test_layers_that_are_gone_before_a_backward_say_nothing_about_parking(fake_device: FakeDevice) -> None:
    module = linear(16, 16, fake_device.device)
    weight = module.get_parameter("weight")
    values, placeholder = weight.detach(), torch.ones(1, device=fake_device.device)

    def come(*_: Any) -> None:
        weight.data = values

    def go(*_: Any) -> None:
        weight.data = placeholder

    module.register_forward_pre_hook(come)
    module.register_forward_hook(go)
    parkable = Parkable(module, batch(fake_device.device), park=print, restore=print, fake_device=fake_device)
    assert verdict("c33_a_gradient", None, parkable).outcome == "not applicable"


def test_the_line_above_the_report_of_a_race_is_not_its_text() -> None:
    assert error_text(RuntimeError("=====\nthe sanitizer detected a race\nmore")) == (
        "RuntimeError: the sanitizer detected a race"
    )


def test_what_a_wrapper_holds_may_be_other_objects_afterwards(fake_device: FakeDevice) -> None:
    found = verdict(
        "c39_", "a wrapper subclass", moved_by_a_hook(fake_device, SUBCLASS.probe(fake_device.device).module)
    )
    assert found.outcome == "kept", found.reason


def test_what_the_first_forward_severs_is_seen(fake_device: FakeDevice) -> None:
    module = SHARING["weights over one storage"].probe(fake_device.device).module
    parkable = moved_by_a_hook(fake_device, module)
    module.register_forward_hook(lambda *_: module.to("cpu").to(fake_device.device) and None)
    assert verdict("c04_", "weights over one storage", parkable).reason.startswith("1 difference: whole: shared its")
