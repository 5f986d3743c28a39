"""Parkables that cannot be tested, each made by a function of the fake device, and what must be said about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from pytest_park.contract import Parkable
from pytest_park.fakegpu import FakeDevice

from .sick.healthy import Healthy, parkable
from .sick.patient import component
from .sick.sharing import CannotRestore, ParksNothing


def healthy(gpu: FakeDevice) -> Parkable:
    return parkable(Healthy, *component(gpu.device))


def parks_nothing(gpu: FakeDevice) -> Parkable:
    return parkable(ParksNothing, *component(gpu.device))


def park_raises(gpu: FakeDevice) -> Parkable:
    def park() -> None:
        raise FileNotFoundError("the swap file is gone")

    return replace(healthy(gpu), park=park)


def restore_raises(gpu: FakeDevice) -> Parkable:
    return parkable(CannotRestore, *component(gpu.device))


def has_no_parameters(gpu: FakeDevice) -> Parkable:
    return Parkable(nn.ReLU(), torch.ones(1), park=lambda: None, restore=lambda: None)


def is_on_the_host(gpu: FakeDevice) -> Parkable:
    return Parkable(nn.Linear(2, 2), torch.ones(1, 2), park=lambda: None, restore=lambda: None)


def has_inputs_elsewhere(gpu: FakeDevice) -> Parkable:
    good = healthy(gpu)
    return replace(good, example_inputs=good.example_inputs[0].cpu())


def has_a_random_forward(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), forward=lambda module, x: module(x) + torch.randn(1).item())


def has_a_forward_that_raises(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), example_inputs=torch.ones(1, 3, device=gpu.device))


def has_no_restore(gpu: FakeDevice) -> Parkable:
    return Parkable(component(gpu.device)[0], park=lambda: None)


def has_a_park_that_is_no_call(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), park="park_non_layer_weights")  # type: ignore[arg-type]


def has_no_module(gpu: FakeDevice) -> Parkable:
    return Parkable({}, park=lambda: None, restore=lambda: None)  # type: ignore[arg-type]


def has_a_number_for_inputs(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), example_inputs=3)


def names_layers_that_are_not_there(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), streamed=("blocks",))


def has_a_percentage(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), significance=10)


def ends_in_one_way_only(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), ends=print)  # type: ignore[arg-type]


def is_in_training_mode(gpu: FakeDevice) -> Parkable:
    made = healthy(gpu)
    made.module.train()
    return made


def is_not_loaded(gpu: FakeDevice) -> Parkable:
    made = healthy(gpu)
    made.module.register_parameter("late", nn.Parameter(torch.empty(2, device="meta")))
    return made


def returns_nothing(gpu: FakeDevice) -> Parkable:
    return None  # type: ignore[return-value]


def adopts_nothing(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), adopt=lambda module, inputs, streamed: None)  # type: ignore[arg-type, return-value]


def adopts_badly(gpu: FakeDevice) -> Parkable:
    return replace(healthy(gpu), adopt=lambda module, inputs, streamed: replace(parks_nothing(gpu), module=module))


SAYS: dict[Callable[[FakeDevice], Parkable], str] = {
    parks_nothing: "park() freed nothing: device bytes were 2,280 before and are 2,280 after, with a headroom of",
    park_raises: "the first park() raised FileNotFoundError: the swap file is gone (bad.py:",
    restore_raises: "the first restore() after the first park() raised RuntimeError: this restore always fails",
    has_no_parameters: "ReLU has no parameters, so there is nothing to park",
    is_on_the_host: "all weights of Linear are on cpu: move the module to the accelerator",
    has_inputs_elsewhere: "an example input of shape [4, 16] is on cpu, the module's weights on fakegpu:0",
    has_a_random_forward: "the forward is random: two calls on the same inputs differ",
    has_a_forward_that_raises: "the forward of the fresh module raised RuntimeError",
    has_no_restore: "Sequential has no method restore_non_layer_weights: pass Parkable(restore=...) with the call that",
    has_a_park_that_is_no_call: "Parkable(park=...) is str, which cannot be called",
    has_no_module: "Parkable(module=...) is dict, not a torch.nn.Module",
    has_a_number_for_inputs: "Parkable(example_inputs=...) is int: give a tensor, a tuple of positional arguments,",
    names_layers_that_are_not_there: "Parkable(streamed=...) names blocks, and Sequential has no submodule of that",
    has_a_percentage: "Parkable(significance=10): it is a share of the headroom, above 0 and at most 1",
    ends_in_one_way_only: "Parkable(ends=...) is builtin_function_or_method, not a mapping of names to calls",
    is_in_training_mode: "the forward changes 1.num_batches_tracked, 1.running_mean, 1.running_var, so that nobody can",
    is_not_loaded: "late is on the meta device and has no values: load the module first",
    returns_nothing: " returned NoneType, not a Parkable",
    adopts_nothing: "Parkable(adopt=...) was given two linear layers, and then: it returned NoneType, not a Parkable",
    adopts_badly: "Parkable(adopt=...) was given two linear layers, and then: ",
}
