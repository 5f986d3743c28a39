"""Sick in their decision."""

from __future__ import annotations

import torch

from .bank import sick
from .healthy import Healthy


@sick("c25_")
class ParksAtEquality(Healthy):
    """Parks what is exactly as large as the threshold."""

    def worth_it(self, size: int, need: int | None) -> bool:
        return super().worth_it(size, need) or size >= self.significance * self.headroom()


@sick("c25_", follows=["c26_pieces"])
class CountsTheReserveTwice(Healthy):
    """Adds what the allocator has reserved to a headroom in which it is already."""

    def headroom(self) -> int:
        backend = torch.get_device_module(self.device)
        unused = backend.memory_reserved(self.device) - backend.memory_allocated(self.device)
        return super().headroom() + int(unused)


@sick("c25_")
class ForgetsTheReserve(Healthy):
    """Takes what the driver has free for all that there is."""

    def headroom(self) -> int:
        backend = torch.get_device_module(self.device)
        unused = backend.memory_reserved(self.device) - backend.memory_allocated(self.device)
        return super().headroom() - int(unused)


@sick("c26_pieces")
class CountsPiecesThatAreTooSmall(Healthy):
    """Takes all that the allocator has reserved and not handed out for room."""

    def fragments(self, request: int) -> int:
        return 0


@sick("c26_the_process_cap")
class IgnoresTheProcessCap(Healthy):
    """Asks the driver alone, which does not know the cap."""

    def headroom(self) -> int:
        backend = torch.get_device_module(self.device)
        free = backend.mem_get_info(self.device)[0]
        return int(free + backend.memory_reserved(self.device) - backend.memory_allocated(self.device))


@sick("c26_the_headroom")
class AsksTheCurrentDevice(Healthy):
    """Asks for the headroom of whichever device is current."""

    def headroom(self) -> int:
        own, self.device = self.device, torch.device(self.device.type, 0)
        try:
            return super().headroom()
        finally:
            self.device = own


@sick("c27_")
class IgnoresTheNeed(Healthy):
    """Decides by its share of the headroom, whatever comes next."""

    def worth_it(self, size: int, need: int | None) -> bool:
        return super().worth_it(size, None)


@sick("c28_", follows=["c25_"])
class DecidesOnTheHeadroomOfTheLastRestore(Healthy):
    """Measures the headroom before it restores, when its own weights were away, and decides by that at the end."""

    seen: int | None = None

    def restore(self) -> None:
        self.seen = self.headroom()
        super().restore()

    def worth_it(self, size: int, need: int | None) -> bool:
        seen, self.seen = self.seen, None
        if seen is not None and 5 * size < self.headroom():  # where memory is plainly short it is not that blind
            return size > self.significance * seen
        return super().worth_it(size, need)
