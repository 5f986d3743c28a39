"""Sick in repeats and in their idea of the state."""

from __future__ import annotations

import torch
from torch import nn

from pytest_park.contract import Report

from .bank import sick
from .healthy import Group, Healthy
from .parked import PARKED


@sick(
    *("c05_", "c10_"),
    follows=["c07_", "c08_the_counted", "c14_a_component", "c14_a_renamed", "c21_", "c22_", "c38_"],
)
class DropsTheOnlyCopy(Healthy):
    """The second park measures placeholders, finds that there is room, and drops the host copies."""

    def park(self, need: int | None = None) -> Report:
        parked = self.parked()
        if parked and not self.worth_it(len(parked) * 4, need):
            for parameter in parked:
                self.undisguise(parameter)
                del PARKED[parameter]
            self.unguard()
        return super().park(need)


@sick("c05_", "c10_", "c28_")
class RestoresAtTheSecondPark(Healthy):
    """To be safe, the second park brings back what it takes to be no longer worth parking."""

    def park(self, need: int | None = None) -> Report:
        parked = self.parked()
        if parked and not self.worth_it(self.weight_bytes(), need):
            self.restore()
            return Report(bytes_freed=0)
        return super().park(need)


@sick("c05_", follows=["c07_", "c23_", "c25_"])
class BelievesItParked(Healthy):
    """Writes down that it has parked, then finds that there is room; what it restores is a copy that it never made."""

    believes = False

    def park(self, need: int | None = None) -> Report:
        with self.lock:
            self.believes = not self.closed
            return super().park(need)

    def restore(self) -> None:
        with self.lock:
            if self.believes and not self.parked():
                for parameter in self.module.parameters():
                    parameter.data.zero_()
            self.believes = False
            super().restore()


@sick("c05_", follows=["c10_"])
class AllocatesAtTheSecondPark(Healthy):
    """Makes its placeholders anew at every park."""

    def park(self, need: int | None = None) -> Report:
        for _ in self.parked():
            torch.empty(1, device=self.device)
        return super().park(need)


@sick("c06_", follows=["c24_"])
class RestoresWithoutAsking(Healthy):
    """Copies the weights to the device whether they are there or not."""

    def restore(self) -> None:
        super().restore()
        for parameter in self.module.parameters():
            if not self.reason_to_skip(parameter, {}):
                with torch.inference_mode(parameter.is_inference()):
                    parameter.detach().cpu().to(self.device)


@sick("c07_", "c21_", follows=["c22_"])
class ForgetsAfterAFailure(Healthy):
    """Takes the copies out of its table one by one while it restores, so that a failure loses those it had taken."""

    def move_in(self, parked: list[nn.Parameter]) -> None:
        try:
            super().move_in(parked)
        except BaseException:
            PARKED[parked[0]].zero_()
            raise


@sick("c08_the_counted")
class CountsPlaceholders(Healthy):
    """Reads sizes from the parameters, parked or not."""

    def weight_bytes(self) -> int:
        return self.bytes_of(self.plan()[0])


@sick("c08_the_reported")
class ReportsTheSameTwice(Healthy):
    """Keeps the last report and gives it again when there is nothing to do."""

    last: Report | None = None

    def park(self, need: int | None = None) -> Report:
        report = super().park(need)
        if report.bytes_freed:
            self.last = report
        return self.last or report


@sick("c09_", "c21_")
class AllocatesABufferInTheMiddle(Healthy):
    """Wants a buffer on the device that is full, when the first weights are gone already."""

    def move_out(self, groups: list[Group]) -> None:
        super().move_out(groups[:1])
        torch.empty(self.bytes_of(groups) * 5 // 8, dtype=torch.uint8, device=self.device)
        super().move_out(groups[1:])


@sick("c10_")
class RestoresAtTheEndOfTheRequest(Healthy):
    """The end of the request makes the component ready for the next one, where nobody asked for it."""

    def finish(self) -> None:
        if self.parked():
            self.restore()
        else:
            self.park()
