"""Whether to park: apart from how it is done."""

from __future__ import annotations

import torch

from park_core.config import OffloadConfig, PerformanceMode
from park_core.memory import HostHeadroom, device_headroom, host_headroom
from park_core.report import ParkDecision
from park_core.sizes import format_size
from park_core.transfer import backend_of

__all__ = ["decide"]


def decide(
    config: OffloadConfig,
    device: torch.device,
    *,
    resident: int,
    parked: int,
    new_host_bytes: int,
    returning: int,
    need: int | None,
) -> ParkDecision:
    """Decide about one component.

    Args:
        config: the component's configuration.
        device: where its non-layer weights are.
        resident: bytes of them that are on the device.
        parked: bytes of them that are parked.
        new_host_bytes: host memory that parking would take.
        returning: parked bytes of other components on the same device. They will come back, so they are not room:
            otherwise equal neighbours flip each other, each parking because the other one did not.
        need: bytes that the next stage needs, if it is known; decides instead of the significance.
    """
    total = resident + parked
    if not config_parks(config, need):
        return ParkDecision(verdict="keep", reason=_off(config), bytes=total)
    if not resident:
        return ParkDecision(verdict="park", reason="nothing of it is on the device, or may leave it", bytes=total)
    if _capturing(device):
        return ParkDecision(verdict="refuse", reason="the device is capturing a graph", bytes=total)
    headroom = device_headroom(device, request=total if need is None else need)
    threshold = int(config.significance * max(0, headroom.bytes - returning))
    if headroom.unified:
        verdict, reason = "refuse", "the device has no memory of its own: parking would free nothing"
    elif config.parking == "always":
        verdict, reason = "park", "parking is set to always"
    elif need is not None:
        short = headroom.bytes < need
        verdict = "park" if short else "keep"
        covers = "does not cover" if short else "covers"
        reason = f"{format_size(headroom.bytes)} of headroom {covers} the stated need of {format_size(need)}"
    else:
        verdict = "park" if total > threshold else "keep"
        compared = "exceeds" if total > threshold else "is within"
        reason = (
            f"{format_size(total)} {compared} {config.significance:.0%} of {format_size(headroom.bytes)} of headroom"
        )
    if verdict == "park" and (refusal := _no_host_room(new_host_bytes, host_headroom())):
        verdict, reason = "refuse", refusal
    if headroom.note:
        reason += f" ({headroom.note})"
    return ParkDecision(verdict=verdict, reason=reason, bytes=total, headroom=headroom, threshold=threshold)  # type: ignore[arg-type]


def config_parks(config: OffloadConfig, need: int | None = None) -> bool:
    """Is parking on at all?"""
    if config.parking == "auto":
        return config.performance_mode is PerformanceMode.MEMORY or need is not None
    return config.parking == "always"


def _off(config: OffloadConfig) -> str:
    if config.parking == "never":
        return "parking is set to never"
    return f"performance mode is {config.performance_mode.value}; weights are parked in mode memory"


def _capturing(device: torch.device) -> bool:
    probe = getattr(backend_of(device), "is_current_stream_capturing", None)
    return bool(probe and probe())


def _no_host_room(wanted: int, host: HostHeadroom) -> str:
    if wanted <= host.bytes:
        return ""
    return f"the host has room for {format_size(host.bytes)}, the host copies need {format_size(wanted)}"
