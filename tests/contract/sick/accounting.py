"""Sick in what they report, and in what adds up."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from pytest_park.contract import Report

from .bank import sick
from .healthy import Group, Healthy, Left
from .parked import PARKED
from .updates import KeepsCopies


@sick("c29_the_report_names_what")
class ReportsWhatItMeantToFree(Healthy):
    """Adds up the sizes of what it parked, whether that freed anything or not."""

    def measured(self, groups: list[Group], sizes: list[int], held: list[bool], skipped: list[Left]) -> Report:
        return Report(bytes_freed=sum(sizes), skipped=super().measured(groups, sizes, held, skipped).skipped)


@sick("c29_the_report_names_what")
class IsSilentAboutWhatIsHeld(Healthy):
    """Measures rightly, and does not say whose bytes stayed."""

    def measured(self, groups: list[Group], sizes: list[int], held: list[bool], skipped: list[Left]) -> Report:
        return Report(bytes_freed=super().measured(groups, sizes, held, []).bytes_freed, skipped=skipped)


@sick("c29_every")
class WalksTheLayers(Healthy):
    """Collects the weights of layers; parameters beside layers in a module stay, and nobody says so."""

    def plan(self) -> tuple[list[Group], list[Left]]:
        groups, skipped = super().plan()
        owners = (module for module in self.module.modules() if any(True for _ in module.children()))
        bare = {parameter for owner in owners for parameter in owner.parameters(recurse=False)}
        return [group for group in groups if not any(parameter in bare for _, parameter in group)], skipped


@sick("c29_the_report_names_the_buffers")
class ForgetsBuffers(Healthy):
    """Does not say that buffers stay."""

    def plan(self) -> tuple[list[Group], list[Left]]:
        groups, skipped = super().plan()
        return groups, [left for left in skipped if left[1] != "a buffer"]


@sick("c29_the_report_names_what")
class ForgetsPlainTensors(Healthy):
    """Does not say that tensors in plain attributes stay."""

    def plan(self) -> tuple[list[Group], list[Left]]:
        groups, skipped = super().plan()
        return groups, [left for left in skipped if left[1] != "a plain tensor attribute"]


@sick("c29_the_report_names_what")
class ForgetsWhatIsOnTheHost(Healthy):
    """Does not say that a weight was on the host already."""

    def plan(self) -> tuple[list[Group], list[Left]]:
        groups, skipped = super().plan()
        return groups, [left for left in skipped if left[1] != "on cpu"]


@sick("c29_the_report_is_true")
class CountsWrappers(Healthy):
    """Counts the outer bytes of wrapper subclasses as freed."""

    def measured(self, groups: list[Group], sizes: list[int], held: list[bool], skipped: list[Left]) -> Report:
        report = super().measured(groups, sizes, held, skipped)
        for parameter in self.module.parameters():
            if hasattr(type(parameter), "__tensor_flatten__"):
                report.bytes_freed += parameter.numel() * parameter.element_size()
        return report


@sick("c30_")
class KeepsATensorPerCycle(Healthy):
    """Remembers something about every cycle."""

    def park(self, need: int | None = None) -> Report:
        self.statistics = [*getattr(self, "statistics", []), torch.empty(0)]
        return super().park(need)


@sick("c30_", follows=["c31_the_counted"])
class CountsMoreWithEveryCycle(Healthy):
    """Adds to its count of host bytes what it copies, and never takes it away."""

    copied = 0

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        self.copied += 1
        super().swap_in(parameter, data)

    def host_bytes(self) -> int:
        return super().host_bytes() + self.copied


@sick("c31_host_bytes", follows=["c31_the_counted"])
class KeepsCopiesAfterRestore(Healthy):
    """Means to drop its copies at restore, and drops them at the next park."""

    def park(self, need: int | None = None) -> Report:
        self.copies: list[torch.Tensor] = []
        return super().park(need)

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        self.copies.append(PARKED[parameter])
        super().swap_in(parameter, data)

    def close(self) -> None:
        super().close()
        self.copies = []


@sick("c31_the_counted")
class CountsByItsState(KeepsCopies):
    """Counts host bytes while something is parked; the copies that it keeps after restore are not in it."""

    def host_bytes(self) -> int:
        return super().host_bytes() if self.parked() else 0


@sick("c31_no_host", follows=["c31_the_counted"])
class LeavesCopiesAtTheEnd(Healthy):
    """Its table is global, and closing does not clear it."""

    table: ClassVar[dict[str, Any]] = {}

    def close(self) -> None:
        copies = [PARKED[parameter] for parameter in self.parked()]
        super().close()
        self.table["copies"] = copies
