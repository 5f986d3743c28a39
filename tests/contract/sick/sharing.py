"""Sick where weights are shared: with streamed layers, other owners, other names, other threads, inner tensors."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from pytest_park.contract import Report

from .bank import sick
from .healthy import Group, HasPlaceholders, Healthy, Left
from .parked import PARKED


@sick("c35_")
class MovesBuffersOfLayers(Healthy):
    """Takes the buffers of streamed layers along, and brings them back to another place."""

    def restore(self) -> None:
        super().restore()
        for module in self.module.modules():
            if any(self.streamer.owns(parameter) for parameter in module.parameters()):
                for name, buffer in module.named_buffers(recurse=False):
                    module.register_buffer(name, buffer.clone())


@sick("c36_")
class IgnoresOtherOwners(Healthy):
    """Parks a shared submodule under the other component's feet."""

    def reason_to_skip(self, parameter: nn.Parameter, buffers: dict[int, str]) -> str:
        reason = super().reason_to_skip(parameter, buffers)
        return "" if reason == "another component is using it" else reason


@sick("c37_", follows=["c04_"])
class UntiesParameters(Healthy):
    """Brings a tied weight back under each name by itself."""

    def restore(self) -> None:
        named = dict(self.module.named_parameters(remove_duplicate=False))
        seen: dict[int, str] = {}
        super().restore()
        for name, parameter in named.items():
            if seen.setdefault(id(parameter), name) != name:
                owner, _, leaf = name.rpartition(".")
                twin = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                setattr(self.module.get_submodule(owner), leaf, twin)


@sick("c38_")
class HasNoLock(Healthy):
    """Two threads do what they like."""

    lock = contextlib.nullcontext()


@sick("c38_")
class GuardsLast(HasPlaceholders):
    """Swaps the data first and refuses forwards afterwards."""

    def move_out(self, groups: list[Group]) -> None:
        copies = [self.copy_out(group) for group in groups]
        for group in groups:
            for _, parameter in group:
                with torch.inference_mode(parameter.is_inference()):
                    parameter.data = self.placeholder_of_one(parameter).expand(1, *parameter.shape)[0]
        for group, copy in zip(groups, copies, strict=True):
            self.swap_out(group, copy)


@sick("c38_")
class GuardsOneWeightTooLate(HasPlaceholders):
    """For a moment, when all is copied and nothing guarded yet, one weight is a placeholder already."""

    def move_out(self, groups: list[Group]) -> None:
        copies = [self.copy_out(group) for group in groups]
        for _, parameter in groups[-1] if groups else ():
            with torch.inference_mode(parameter.is_inference()):
                parameter.data = self.placeholder_of_one(parameter).expand(1, *parameter.shape)[0]
        for group, copy in zip(groups, copies, strict=True):
            self.swap_out(group, copy)


@sick("c39_")
class HidesWrappers(Healthy):
    """Leaves wrapper subclasses alone and does not say so."""

    def plan(self) -> tuple[list[Group], list[Left]]:
        groups, skipped = super().plan()
        return groups, [left for left in skipped if left[1] != "wraps other tensors"]


@sick("c39_")
class ForgetsDTensors(Healthy):
    """Names the wrapper subclasses that it leaves alone, but knows of no DTensor."""

    def plan(self) -> tuple[list[Group], list[Left]]:
        groups, skipped = super().plan()
        unseen = [name for name, p in self.module.named_parameters() if type(p).__name__ == "DTensor"]
        return groups, [left for left in skipped if left[0] not in unseen]


@sick("c40_host_copies")
class PinsUnasked(Healthy):
    """Pins its host copies by default."""

    def copy_out(self, group: Group) -> list[torch.Tensor]:
        self.pinned = True
        try:
            return super().copy_out(group)
        finally:
            self.pinned = False


@sick("c40_no_pageable")
class CopiesAsynchronously(Healthy):
    """Does not wait for copies from pageable memory."""

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        for parameter in parameters:
            PARKED[parameter].to(self.device, non_blocking=True)
        return super().copy_in(parameters)


@sick("c00_")
class ParksNothing(Healthy):
    """Returns as if it had parked."""

    def park(self, need: int | None = None) -> Report:
        return Report(bytes_freed=0)


@sick("c00_")
class CannotRestore(Healthy):
    """Raises when it is to restore."""

    def restore(self) -> None:
        raise RuntimeError("this restore always fails")
