"""Whether the parkable can be tested at all. Runs first; where it fails, nothing else is worth reading."""

from __future__ import annotations

from ..case import Case
from ..registry import promise


@promise(
    0,
    "the parkable can be tested: it has weights on a device, its forward repeats itself, it parks and restores",
    cause="",
)
def check_the_parkable_can_be_tested(case: Case) -> None:
    case.park()
    case.restore()
