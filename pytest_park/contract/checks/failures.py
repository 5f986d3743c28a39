"""C21 to C24: what happens in the middle of a park or a restore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..case import Case
from ..registry import promise
from ..verdict import Broken, NotApplicable, bytes_text

ERRORS: dict[str, Callable[[], BaseException]] = {
    "out of memory": lambda: torch.OutOfMemoryError("out of memory, injected by the contract"),
    "MemoryError": lambda: MemoryError("injected by the contract"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("injected by the contract"),
}


@dataclass(frozen=True)
class Fault:
    """What fails, during which verb."""

    verb: str
    kind: str
    error: str


FAULTS = {
    f"{error} at {'an' if kind[0] in 'aeiou' else 'a'} {kind} in {verb}": Fault(verb, kind, error)
    for verb, kinds in (("park", ("allocation", "host copy")), ("restore", ("allocation", "device copy")))
    for kind in kinds
    for error in ERRORS
}
#: A component of ten thousand weights would need as many attempts; after the first ones every step is a longer one.
MOST_ATTEMPTS = 24


@promise(
    21,
    "after a failure at any allocation or copy all is parked or all is resident, the error passes, and a retry is "
    "right",
    cause="weights are swapped one by one while copying, so that a failure leaves half of each",
    reports=("sgl-project/sglang/pull/32600", "huggingface/diffusers/issues/5060"),
    variants=FAULTS,
)
def check_a_failure_leaves_all_or_nothing(case: Case, fault: Fault) -> None:
    resident = case.device.bytes
    action = case.parkable.park if fault.verb == "park" else case.parkable.restore
    if fault.verb == "restore":
        case.park()
    start = case.device.bytes
    levels: dict[int, str] = {}
    after = 1
    for attempt in range(MOST_ATTEMPTS):
        if fault.verb == "park":
            case.scarce()
        else:
            case.device.relieve()
        injected = ERRORS[fault.error]()
        case.device.arm(fault.kind, after, injected)
        label = f"{fault.verb} (fails at {fault.kind} {after})"
        error = case.attempt(label, action)
        case.device.disarm()
        if injected.__traceback__ is None:
            break  # there are fewer than so many
        if error is not None and error is not injected:
            raise Broken(
                expected=f"the {type(injected).__name__} that was injected passes unchanged",
                seen=f"{type(error).__name__}: {error}",
            ) from error
        injected.__traceback__ = None  # its frames hold tensors
        levels[case.device.settled_bytes()] = label
        if case.device.bytes == resident:
            case.device.relieve()
            case.expect_same(after=label)
        after += 1 + attempt // 8
    else:
        case.note("...")
    if not levels:
        raise NotApplicable(f"{fault.verb} makes no {fault.kind}")
    case.park()
    parked = case.device.settled_bytes()
    case.restore()
    case.expect_same(after="a failure, a retry and a cycle")
    case.expect_output(after="a failure, a retry and a cycle")
    for level, label in levels.items():
        if level not in (resident, parked):
            raise Broken(
                expected=f"{bytes_text(resident)} (resident) or {bytes_text(parked)} (parked) on the device after "
                f"{label}; it began with {bytes_text(start)}",
                seen=f"{bytes_text(level)}: some of each",
            )


@promise(
    22,
    "after a failed restore a park frees everything again",
    cause="park skips what is marked as parked, though the failed restore has brought some of it back",
    reports=("sgl-project/sglang/pull/32600",),
)
def check_a_park_after_a_failed_restore_frees_everything(case: Case) -> None:
    case.park()
    parked = case.device.settled_bytes()
    failed = False
    for kind in ("allocation", "device copy"):
        for after in (1, 2, 3):
            case.device.relieve()
            injected = ERRORS["out of memory"]()
            case.device.arm(kind, after, injected)
            case.attempt(f"restore (fails at {kind} {after})", case.parkable.restore)
            case.device.disarm()
            failed = failed or injected.__traceback__ is not None
            injected.__traceback__ = None
            case.park()
            case.expect_bytes(at_most=parked, what="what there was while parked, before the failed restore")
    if not failed:
        raise NotApplicable("restore makes no allocation and no copy that can fail")
    case.restore()
    case.expect_same(after="failed restores")


@promise(
    23,
    "a probe of the headroom that raises changes nothing",
    cause="the probe is asked after the first copies are made or dropped",
    reports=("ROCm/librocdxg/issues/57", "pytorch/pytorch/issues/126015"),
    variants={"at the first park": False, "at a second park": True},
)
def check_a_probe_that_raises_changes_nothing(case: Case, parked: bool) -> None:
    if parked:
        case.park()
    before = case.device.settled_bytes()
    case.scarce()
    case.device.fake.driver = "raises"
    error = case.attempt("park with a driver that cannot tell what is free", case.parkable.park)
    case.device.relieve()
    if error is not None and case.device.settled_bytes() != before:
        raise Broken(
            expected=f"{bytes_text(before)} on the device, as before",
            seen=f"{bytes_text(case.device.bytes)} after {type(error).__name__}",
        )
    if case.device.bytes > before:
        raise Broken(expected=f"at most {bytes_text(before)}", seen=bytes_text(case.device.bytes))
    case.restore()
    case.expect_same(after="a probe that raised, and restore")


@promise(
    24,
    "restore needs no more device memory than the weights and once the largest of them",
    cause="restore copies everything to the device in another layout or dtype first, or stages it in one large buffer",
    reports=("huggingface/diffusers/issues/5060",),
)
def check_restore_needs_little_more_than_the_weights(case: Case) -> None:
    resident = case.device.allocated
    largest = max(case.storages().values(), default=0)
    most = resident + -(-largest // 512) * 512
    case.park()
    case.device.relieve()
    case.device.reset_peak()
    case.restore()
    if case.device.peak > most:
        raise Broken(
            expected=f"a peak of at most {bytes_text(most)} (in blocks of 512): all weights and once the largest",
            seen=f"{bytes_text(case.device.peak)}",
        )
    resident = case.device.allocated
    case.device.reset_peak()
    case.restore()
    if case.device.peak > resident:
        raise Broken(
            expected=f"a peak of {bytes_text(resident)} in a restore with everything resident",
            seen=bytes_text(case.device.peak),
        )
