"""Two threads in one component: the second waits or is refused by name, and nobody computes with a placeholder."""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conftest import ALWAYS, Denoiser, assert_same_bits, snapshot
from park_core import ComponentResidencyManager, OffloadConfig, WeightsParkedError
from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import FakeDevice

POINTS = {
    "after a copy to the host": "park_core.transfer.Transfer.to_host",
    "after a copy to the device": "park_core.transfer.Transfer.to_device",
    "after a swap to the placeholder": "park_core.parking.hide",
    "after a swap to the device": "park_core.parking.show",
    "after the guards": "park_core.parking.refresh_guards",
}


def at_every_call(monkeypatch: pytest.MonkeyPatch, target: str, then: Callable[[], None]) -> None:
    """Call ``then`` after each call of the function at ``target``."""
    original = pkgutil.resolve_name(target)

    def wrapped(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        then()
        return result

    monkeypatch.setattr(target, wrapped)


@pytest.fixture
def component(fake_device: FakeDevice) -> Denoiser:
    torch.manual_seed(0)
    component = Denoiser().eval().requires_grad_(False)
    config = OffloadConfig(parking="always", keep_host_copies=False)  # so that every park has something to copy
    component.configure_layerwise_offload(config, device=fake_device.device)
    return component


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("verb", ["park_non_layer_weights", "restore_non_layer_weights"])
def test_a_forward_in_the_middle_is_right_or_refused(
    monkeypatch: pytest.MonkeyPatch, component: Denoiser, tokens: Tensor, point: str, verb: str
) -> None:
    expected, seen = component(tokens), []

    def forward() -> None:
        try:
            seen.append(torch.equal(component(tokens), expected))
        except WeightsParkedError:
            seen.append(True)

    if verb == "restore_non_layer_weights":
        component.park_non_layer_weights()
    with monkeypatch.context() as patch:
        at_every_call(patch, POINTS[point], forward)
        getattr(component, verb)()
    elsewhere = {"park_non_layer_weights": "device", "restore_non_layer_weights": "host"}[verb]
    assert seen or elsewhere in point or "placeholder" in point
    assert all(seen)
    component.restore_non_layer_weights()
    assert torch.equal(component(tokens), expected)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("first", ["park_non_layer_weights", "restore_non_layer_weights"])
@pytest.mark.parametrize(
    "second", ["park_non_layer_weights", "restore_non_layer_weights", "state_dict", "configure_layerwise_offload"]
)
def test_a_verb_of_another_thread_in_the_middle_waits(
    monkeypatch: pytest.MonkeyPatch, component: Denoiser, tokens: Tensor, point: str, first: str, second: str
) -> None:
    values, expected = snapshot(component), component(tokens)
    if first == "restore_non_layer_weights":
        component.park_non_layer_weights()
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            getattr(component, second)()
        except BaseException as error:
            errors.append(error)

    def start() -> None:
        if not threads:
            threads.append(threading.Thread(target=run))
            threads[0].start()

    with monkeypatch.context() as patch:
        at_every_call(patch, POINTS[point], start)
        getattr(component, first)()
        for thread in threads:
            thread.join()
    assert errors == []
    component.restore_non_layer_weights()
    assert torch.equal(component(tokens), expected)
    assert_same_bits(snapshot(component), values)


class Hollow(TorchFunctionMode):
    """Before every call of torch: the weights that are placeholders and do not refuse to compute."""

    def __init__(self, component: torch.nn.Module) -> None:
        super().__init__()
        self.component = component
        self.seen: list[str] = []
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        for name, weight in self.component.named_parameters():
            with torch._C.DisableTorchFunctionSubclass():
                empty = not weight.untyped_storage().nbytes()
            if empty and not is_parked(weight):
                self.seen.append(f"{name} before {func.__name__}")
        return func(*args, **(kwargs or {}))


def test_no_thread_sees_a_placeholder_that_does_not_refuse(component: Denoiser) -> None:
    with Hollow(component) as witness:
        component.park_non_layer_weights()
        component.restore_non_layer_weights()
    assert witness.seen == []
    assert witness.calls > 50


def test_parking_waits_for_the_end_of_a_use(fake_device: FakeDevice, component: Denoiser, tokens: Tensor) -> None:
    expected = component(tokens)
    manager = ComponentResidencyManager({"denoiser": component}, device=fake_device.device)
    thread = threading.Thread(target=component.park_non_layer_weights)
    with manager.use("denoiser"):
        thread.start()
        for _ in range(3):
            assert torch.equal(component(tokens), expected)
    thread.join()


def test_two_threads_in_one_pipeline(fake_device: FakeDevice, tokens: Tensor) -> None:
    components = {name: Denoiser().eval().requires_grad_(False) for name in ("first", "second")}
    components["second"].embed = components["first"].embed
    manager = ComponentResidencyManager(components, config=ALWAYS, device=fake_device.device)
    expected = {}
    for name in components:
        with manager.use(name) as ready:
            expected[name] = ready(tokens)
    wrong: list[object] = []

    def work(order: tuple[str, str]) -> None:
        try:
            for _ in range(5):
                for name in order:
                    with manager.use(name) as ready:
                        if not torch.equal(ready(tokens), expected[name]):
                            wrong.append(name)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(order,)) for order in (("first", "second"), ("second", "first"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
