"""Sick in the middle of a park or a restore."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytest_park.contract import Report

from .bank import sick
from .healthy import Group, Healthy, flat_bytes
from .parked import PARKED


@sick("c21_")
class SwapsWhileCopyingOut(Healthy):
    """Parks weight by weight."""

    def move_out(self, groups: list[Group]) -> None:
        for group in groups:
            self.swap_out(group, self.copy_out(group))


@sick("c21_")
class SwapsWhileCopyingIn(Healthy):
    """Restores weight by weight."""

    def move_in(self, parked: list[nn.Parameter]) -> None:
        storages: dict[int, list[nn.Parameter]] = {}
        for parameter in parked:
            storages.setdefault(PARKED[parameter].untyped_storage()._cdata, []).append(parameter)
        for parameters in storages.values():
            super().move_in(parameters)


@sick("c21_")
class HidesTheError(Healthy):
    """Raises an error of its own in place of the real one."""

    def move_out(self, groups: list[Group]) -> None:
        try:
            super().move_out(groups)
        except Exception as error:
            raise RuntimeError("parking failed") from error


@sick("c21_")
class LeavesHalfAfterAnInterrupt(Healthy):
    """Rolls back after an Exception; KeyboardInterrupt is none."""

    def move_out(self, groups: list[Group]) -> None:
        done: list[Group] = []
        try:
            for group in groups:
                self.swap_out(group, self.copy_out(group))
                done.append(group)
        except Exception:
            for group in done:
                super().move_in([parameter for _, parameter in group])
            raise


@sick("c22_")
class BelievesItsFlag(Healthy):
    """A restore that failed once and was tried again counts as failed, so that park takes everything for parked."""

    failed = False

    def restore(self) -> None:
        try:
            super().restore()
        except torch.OutOfMemoryError:
            super().restore()
            self.failed = True
            raise

    def park(self, need: int | None = None) -> Report:
        if self.failed:
            self.failed = False
            return Report(bytes_freed=0)
        return super().park(need)


@sick("c23_")
class DropsBeforeItAsks(Healthy):
    """Takes the old copies out of its table, and then asks for the headroom."""

    def worth_it(self, size: int, need: int | None) -> bool:
        old = {parameter: PARKED[parameter].clone() for parameter in self.parked()}
        for parameter in old:
            PARKED[parameter].zero_()
        answer = super().worth_it(size, need)
        for parameter, copy in old.items():
            PARKED[parameter].copy_(copy)
        return answer


@sick("c23_")
class BeginsBeforeItAsks(Healthy):
    """Takes away the first weights while the driver thinks, and leaves it at that when there is no answer."""

    def worth_it(self, size: int, need: int | None) -> bool:
        try:
            return super().worth_it(size, need)
        except RuntimeError:
            self.move_out(self.plan()[0][:1])
            raise


@sick("c24_", follows=["c30_", "c38_"])
class StagesEverythingOnTheDevice(Healthy):
    """Restores through one buffer on the device that holds everything once more."""

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        staged: list[Any] = [PARKED[parameter].to(self.device) for parameter in parameters]
        staged += [flat_bytes(PARKED[parameter].untyped_storage(), torch.device("cpu")) for parameter in parameters]
        return super().copy_in(parameters)
