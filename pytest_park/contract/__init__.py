"""What every parkable module must do, as checks that know nothing of the code that parks it.

Subclass :class:`ParkableContract` in a test suite, or call :func:`check`, or run
``python -m pytest_park.contract module:factory``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .examine import check, examine
from .parkable import Parkable, Report
from .verdict import Finding, NotApplicable, Untestable, Verdict

if TYPE_CHECKING:
    from .testclass import ParkableContract

__all__ = [
    "Finding",
    "NotApplicable",
    "Parkable",
    "ParkableContract",
    "Report",
    "Untestable",
    "Verdict",
    "check",
    "examine",
]


def __getattr__(name: str) -> Any:
    # The class needs pytest, the rest does not: a program may call check() where pytest is not installed.
    if name == "ParkableContract":
        from .testclass import ParkableContract

        return ParkableContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
