"""How many times longer one thing takes than another. Both are measured in turn, in the same process and minute, and in
processor time: what else the machine does falls on both."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def ratio(this: Callable[[], object], other: Callable[[], object], *, rounds: int = 15, calls: int = 1) -> float:
    """Time of *this* over time of *other*, each the least of *rounds* of *calls* calls, with torch on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        this(), other()  # what happens at the first call only
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            for which, function in enumerate((this, other)):
                best[which] = min(best[which], _seconds(function, calls))
        return best[0] / best[1]
    finally:
        torch.set_num_threads(threads)


def _seconds(function: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return time.process_time() - start
