"""Sick where the module changes its structure, or parking ends, while weights are parked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytest_park.contract import Report

from .bank import sick
from .healthy import Group, Healthy
from .parked import PARKED


class RemembersNames(Healthy):
    """Keeps a table of what it parked, by name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.by_name: dict[str, tuple[int, torch.Tensor]] = {}
        super().__init__(*args, **options)

    def swap_out(self, group: Group, copies: list[torch.Tensor]) -> None:
        super().swap_out(group, copies)
        for (name, parameter), copy in zip(group, copies, strict=True):
            self.by_name[name] = (id(parameter), copy)

    def restore(self) -> None:
        with self.lock:
            super().restore()
            self.by_name.clear()


@sick("c13_a_renamed", follows=["c14_a_renamed", "c36_"])
class RestoresByName(RemembersNames):
    """Looks for each parked weight under the name that it had, and skips it when that is gone."""

    def parked(self) -> list[nn.Parameter]:
        named = dict(self.module.named_parameters())
        return [named[name] for name in self.by_name if name in named and named[name] in PARKED]


@sick("c13_a_replaced")
class OverwritesReplacedParameters(RemembersNames):
    """Writes the old copy to whatever has the old name now."""

    def restore(self) -> None:
        for name, parameter in self.module.named_parameters():
            if name in self.by_name and self.by_name[name][0] != id(parameter):
                parameter.data.copy_(self.by_name[name][1])
        super().restore()


@sick("c13_a_deleted")
class KeepsCopiesOfTheDeleted(RemembersNames):
    """Never takes a name out of its table that the module no longer has."""

    def restore(self) -> None:
        names = dict(self.module.named_parameters())
        gone = {name: copy for name, copy in self.by_name.items() if name not in names}
        super().restore()
        self.by_name |= gone


@sick("c14_a_renamed")
class ParksUnknownNames(RemembersNames):
    """Takes a parked weight under a new name for a resident one, and its placeholder for its value."""

    def park(self, need: int | None = None) -> Report:
        with self.lock:
            for name, parameter in self.module.named_parameters():
                if self.by_name and name not in self.by_name and parameter in PARKED:
                    PARKED[parameter] = torch.zeros_like(PARKED[parameter])
            return super().park(need)


@sick("c14_reconfiguration")
class ReconfiguresPlaceholders(Healthy):
    """Setting it up anew forgets what is parked."""

    def reconfigure(self) -> None:
        self.unguard()
        for parameter in self.parked():
            self.undisguise(parameter)
            del PARKED[parameter]


@sick("c14_a_component")
class SecondOwnerTakesPlaceholders(Healthy):
    """A second component over a parked submodule takes its placeholders for weights."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        for parameter in module.parameters():
            if parameter in PARKED:
                PARKED[parameter] = torch.zeros_like(PARKED[parameter])
        super().__init__(module, *args, **options)


@sick("c15_", "c31_no_host", follows=["c31_the_counted"])
class CloseIsOnlyAFlag(Healthy):
    """Closing switches it off, after which restore returns at once."""

    def close(self) -> None:
        self.closed = True


@sick("c15_")
class ParksAfterTheEnd(Healthy):
    """The old handle goes on parking, though nobody will restore."""

    def close(self) -> None:
        self.restore()
        self.ended = True

    def restore(self) -> None:
        if not getattr(self, "ended", False):
            super().restore()
