"""C25 to C28: whether to park."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..case import Case
from ..device import MIB, Device
from ..parkable import Parkable
from ..probes import Calculation, batch, plain, ramp
from ..registry import promise
from ..traits import PLAIN
from ..verdict import Broken, NotApplicable, bytes_text, error_text


@dataclass(frozen=True)
class Threshold:
    """A headroom this many bytes from the threshold, how much of it lies in the allocator, and what must happen."""

    off: int
    in_allocator: bool
    after_a_cycle: bool
    parks: bool


THRESHOLDS = {
    f"{where}{', half of it in the allocator' if reserve else ''}{', after a cycle' if cycle else ''}": Threshold(
        off, reserve, cycle, off < 0
    )
    for where, off in (("exactly at the threshold", 0), ("one byte less headroom", -1), ("one byte more", 1))
    for reserve in (False, True)
    for cycle in (False, True)
}


@promise(
    25,
    "the decision is exact to the byte at the threshold, with the allocator's reserve counted once",
    cause="""sizes are taken from placeholders or rounded, the comparison is the wrong way at equality, or the
        allocator's unused reserve is left out or counted twice""",
    reports=("sgl-project/sglang/pull/40592",),
    variants=THRESHOLDS,
    on=PLAIN,
)
def check_the_decision_is_exact_at_the_threshold(case: Case, at: Threshold) -> None:
    share = case.parkable.significance
    if share is None:
        raise NotApplicable("Parkable(significance=...) is not declared")
    if not case.device.is_fake:
        raise NotApplicable("a real device's headroom cannot be set to the byte: use the fake device")
    if at.after_a_cycle:
        case.cycle()
    headroom = round(case.bytes / share) + at.off
    one_piece = -(-case.bytes // 512) * 512  # a smaller one is of no use to a component of this size
    case.device.set_headroom(headroom, in_allocator=headroom // 2 if at.in_allocator else one_piece)
    before = case.device.bytes
    case.attempt(f"park (headroom {bytes_text(headroom)})", case.parkable.park)
    freed = before - case.device.settled_bytes()
    if (freed > 0) != at.parks:
        raise Broken(
            expected=f"the weights are {'parked' if at.parks else 'kept'}, because {case.bytes:,} bytes are "
            f"{'' if at.parks else 'not '}more than {share:g} x {headroom:,} bytes of headroom",
            seen=f"they were parked, {bytes_text(freed)} came free" if freed else "nothing was parked",
        )
    case.restore()
    case.expect_same()


@promise(
    26,
    "the process cap counts: what the driver has free beyond it is not headroom",
    cause="headroom is read from the driver alone, which knows nothing of set_per_process_memory_fraction",
    reports=("sgl-project/sglang/pull/40592", "vllm-project/vllm/pull/11743"),
    on=PLAIN,
)
def check_the_process_cap_counts(case: Case) -> None:
    if case.parkable.significance is None:
        raise NotApplicable("Parkable(significance=...) is not declared")
    case.device.set_cap(case.bytes)
    before = case.device.bytes
    case.attempt(f"park (the process cap leaves {bytes_text(case.bytes)})", case.parkable.park)
    freed = before - case.device.settled_bytes()
    if freed <= 0:
        raise Broken(
            expected=f"parks {bytes_text(case.bytes)} when the process cap leaves as many",
            seen=f"nothing was freed; the driver has {bytes_text(case.device.headroom)} free, out of reach",
        )
    case.restore()
    case.expect_same()


@promise(
    26,
    "what the allocator has reserved in pieces that are too small for the weights is not headroom",
    cause="""reserved minus allocated is taken for room, also where it lies in many pieces between live tensors, so that
        nothing as large as a weight fits""",
    reports=("sgl-project/sglang/pull/40592",),
)
def check_pieces_that_are_too_small_are_not_headroom(case: Case) -> None:
    share = case.parkable.significance
    if share is None:
        raise NotApplicable("Parkable(significance=...) is not declared")
    size, piece = (
        2 * MIB,
        MIB + 512,
    )  # the smallest that torch's allocators do not take from their pool for small blocks
    count = round(1.5 * size / share) // piece + 1
    if 3 * count * piece > case.device.headroom:
        raise NotApplicable(f"needs a device with {bytes_text(3 * count * piece)} free")
    parkable = _large(case, size)
    case.device.set_fragments(count, piece)
    before = case.device.bytes
    free = f"{count} pieces of {bytes_text(piece)}"
    error = case.attempt(f"park {bytes_text(size)} (free: {free})", parkable.park)
    freed = before - case.device.settled_bytes()
    case.device.relieve()
    case.attempt("restore", parkable.restore)
    if freed <= 0:
        raise Broken(
            expected=f"parks {bytes_text(size)} when all that is free are {free} between live tensors",
            seen=error_text(error)
            if error is not None
            else f"nothing was freed: the {bytes_text(count * piece)} together were taken for room",
        )


def _large(case: Case, size: int) -> Parkable:
    """A parkable over one weight of *size* bytes."""

    def read_a_little(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.large[:8]
        return result

    device = case.device.device
    return case.adopt(Calculation(read_a_little, large=ramp(size // 4, device=device)), batch(device, 8))


@promise(
    26,
    "headroom is that of the component's own device, whichever device is current",
    cause="the probe asks the current device",
    reports=("sgl-project/sglang/pull/40592",),
    variants={"its own device is full": True, "the current device is full": False},
)
def check_the_headroom_is_that_of_the_own_device(case: Case, own_is_full: bool) -> None:
    if case.parkable.significance is None:
        raise NotApplicable("Parkable(significance=...) is not declared")
    current = case.device.device
    others = [
        index for index in range(torch.get_device_module(current).device_count()) if index != (current.index or 0)
    ]
    if not others:
        raise NotApplicable("there is one device only")
    other = torch.device(current.type, others[0])
    fake = case.parkable.fake_device
    fakes = list(getattr(fake, "devices", ())) if fake is not None else []
    if fake is not None and len(fakes) < 2:
        raise NotApplicable("the fake device has no .devices")
    probe = plain(other)
    parkable = case.adopt(probe.module, probe.inputs)
    elsewhere = Device(other, _of(fakes, other))
    size = sum(weight.untyped_storage().nbytes() for weight in probe.module.parameters())
    full, roomy = (elsewhere, case.device) if own_is_full else (case.device, elsewhere)
    try:
        roomy.relieve()
        full.set_headroom(size // 2)
        before = elsewhere.bytes
        case.attempt(f"park a component on {other}, with {full.device} full", parkable.park)
        freed = before - elsewhere.settled_bytes()
    finally:
        elsewhere.relieve()
        case.device.relieve()
    case.attempt("restore it", parkable.restore)
    if (freed > 0) != own_is_full:
        raise Broken(
            expected=f"a component on {other} is {'parked' if own_is_full else 'kept'} when {full.device} is full and "
            f"{roomy.device}, the {'current' if own_is_full else 'own'} one, is not",
            seen=f"it was parked, {bytes_text(freed)} came free" if freed else "it was kept",
        )


def _of(fakes: list[Any], device: torch.device) -> Any:
    return next((fake for fake in fakes if getattr(fake, "device", fake) == device), None)


@promise(
    27,
    "it parks whenever the next stage needs more than is free, and that allocation then succeeds",
    cause="the decision knows only its share of the headroom, and not what the next stage needs",
    reports=("sgl-project/sglang/pull/40592",),
)
def check_a_stated_need_is_met(case: Case) -> None:
    if case.parkable.park_for is None:
        raise NotApplicable("Parkable(park_for=...) is not declared")
    device = case.device.device
    size = 12 * MIB
    parkable = _large(case, size)
    share = case.parkable.significance or 0.1
    headroom = round(size / share) + 30 * MIB
    if case.device.headroom < headroom + size:
        raise NotApplicable(f"needs a device with {bytes_text(headroom + size)} free")
    case.device.set_headroom(headroom)
    need = headroom + size // 2
    before = case.device.bytes
    assert parkable.park_for is not None
    park_for = parkable.park_for
    error = case.attempt(f"park for a need of {bytes_text(need)}, {bytes_text(headroom)} free", lambda: park_for(need))
    freed = before - case.device.settled_bytes()
    try:
        torch.empty(need, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise Broken(
            expected=f"an allocation of {bytes_text(need)} succeeds after parking for it",
            seen=f"out of memory; parking freed {bytes_text(freed)} of {bytes_text(size)}"
            + (f" and raised {type(error).__name__}: {error}" if error else ""),
        ) from None
    finally:
        case.device.relieve()
    case.attempt("restore", parkable.restore)


@promise(
    28,
    "two equal neighbours do not flip each other's state under constant load",
    cause="each one's decision depends on whether the other is parked just now, and the second end of use undoes the "
    "first",
    reports=("sgl-project/sglang/issues/38166",),
)
def check_equal_neighbours_do_not_oscillate(case: Case) -> None:
    device = case.device.device
    probes = [plain(device), plain(device)]
    pair = [case.adopt(probe.module, probe.inputs) for probe in probes]
    size = sum(weight.untyped_storage().nbytes() for weight in probes[0].module.parameters())
    share = case.parkable.significance or 0.1
    headroom = round(0.95 * size / share)  # with one of them parked it is more than the threshold, and so they may flip
    case.device.set_headroom(headroom)
    case.history.append(f"headroom {bytes_text(headroom)} with two components of {size:,} resident")
    case.history.append("five requests: each component is restored and parked, and parked again at the end")
    repeats = [_request(case, pair) for _ in range(5)]
    for parkable in pair:
        case.device.relieve()
        case.attempt("restore", parkable.restore)
    for step, *levels in zip(STEPS, *repeats[1:], strict=True):
        if len(set(levels)) > 1:
            raise Broken(
                expected="the same device bytes at each step of requests 2 to 5",
                seen=f"after {step}: {', '.join(f'{level:,}' for level in levels)} bytes",
            )


STEPS = (
    *("the first is restored", "the first parks", "the second is restored", "the second parks"),
    *("the first parks again at the end of the request", "the second parks again at the end of the request"),
)


def _request(case: Case, pair: list[Parkable]) -> list[int]:
    """Each component is used once; then the request ends, which ends each use again. Device bytes after every step."""
    levels = []
    for parkable in pair:
        for verb in (parkable.restore, parkable.park):
            verb()
            levels.append(case.device.bytes)
    for parkable in pair:
        before = case.device.bytes
        parkable.park()
        levels.append(case.device.bytes)
        if levels[-1] > before:
            raise Broken(
                expected="the end of the request restores nothing",
                seen=f"{levels[-1] - before:,} more bytes on the device",
            )
    return levels
