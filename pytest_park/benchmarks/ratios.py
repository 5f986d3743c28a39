"""How many times longer one thing takes than another. They are measured in turn, in the same process and minute: what
else the machine does falls on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from park_core.transfer import synchronize


def ratio(this: Callable[[], object], other: Callable[[], object], *, rounds: int = 15, calls: int = 1) -> float:
    """Processor time of *this* over that of *other*, each the least of *rounds* of *calls* calls, with torch on one
    thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        this(), other()  # what happens at the first call only
        mine, others = least_seconds(this, other, rounds=rounds, calls=calls, clock=time.process_time)
        return mine / others
    finally:
        torch.set_num_threads(threads)


def least_seconds(
    *functions: Callable[[], object], rounds: int, clock: Callable[[], float], calls: int = 1
) -> list[float]:
    """For each of *functions*, called in turn, the least of *rounds*: seconds of *clock* for *calls* calls."""
    least = [float("inf")] * len(functions)
    for _ in range(rounds):
        for which, function in enumerate(functions):
            start = clock()
            for _ in range(calls):
                function()
            least[which] = min(least[which], clock() - start)
    return least


def wall_clock(device: torch.device) -> Callable[[], float]:
    """A clock that is read when *device* has done all that it was given."""

    def read() -> float:
        synchronize(device)
        return time.perf_counter()

    return read
