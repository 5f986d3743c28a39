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
    adopts_badly: "Parkable(adopt=...) was given two linear layers, and then: ",
}
