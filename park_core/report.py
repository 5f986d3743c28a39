"""What a park or a restore did, for people and for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from park_core.memory import Headroom
from park_core.sizes import format_size

__all__ = ["ParkDecision", "ParkReport", "RestoreReport", "Skipped"]

Verdict = Literal["park", "keep", "refuse"]


class Skipped(NamedTuple):
    """Something that stays on the device, and why."""

    name: str
    reason: str
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkDecision:
    """Whether to park, with everything that went into it.

    Attributes:
        verdict: ``park``; ``keep`` (there is room, or parking is off); ``refuse`` (parking would be wrong).
        reason: one sentence.
        bytes: size of the component's non-layer weights, wherever they are.
        headroom: what was measured; None if the verdict did not need it.
        threshold: bytes above which the weights are significant; None if significance was not asked.
    """

    verdict: Verdict
    reason: str
    bytes: int = 0
    headroom: Headroom | None = None
    threshold: int | None = None


@dataclass(slots=True, kw_only=True)
class ParkReport:
    """What one park did.

    Attributes:
        component: name of the component.
        decision: what was decided and why.
        bytes_freed: device bytes whose storage really went away: measured, not believed.
        bytes_to_host: bytes that were transferred.
        seconds: wall time, decision included.
        skipped: what stays on the device, and why.
    """

    component: str
    decision: ParkDecision
    bytes_freed: int = 0
    bytes_to_host: int = 0
    seconds: float = 0.0
    skipped: list[Skipped] = field(default_factory=list)

    def __str__(self) -> str:
        line = f"{self.component}: {self.decision.verdict} ({self.decision.reason})"
        if self.decision.verdict == "park":
            line += (
                f"; freed {format_size(self.bytes_freed)}, moved {_moved(self.bytes_to_host, self.seconds)} to the host"
            )
        return "\n".join([line, *(f"  stays: {s.name} ({format_size(s.bytes)}): {s.reason}" for s in self.skipped)])


@dataclass(slots=True, kw_only=True)
class RestoreReport:
    """What one restore did.

    Attributes:
        component: name of the component.
        bytes_restored: bytes of weights that are back on the device.
        bytes_relocated: those of them that came back to another address than they left. A graph that was captured
            before (``torch.cuda.CUDAGraph``) still reads the old one: capture it again.
        bytes_to_device: bytes that were transferred.
        seconds: wall time.
    """

    component: str
    bytes_restored: int = 0
    bytes_relocated: int = 0
    bytes_to_device: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        moved = _moved(self.bytes_to_device, self.seconds)
        return f"{self.component}: restored {format_size(self.bytes_restored)}, moved {moved} to the device"


def _moved(count: int, seconds: float) -> str:
    rate = f" ({count / seconds / 1024**3:.2f} GiB/s)" if seconds > 0 and count else ""
    return f"{format_size(count)} in {seconds:.3f} s{rate}"
