"""C29 to C31: what the reports say, and that nothing adds up over many uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..case import Case
from ..host import HostLedger
from ..probes import ramp
from ..registry import promise
from ..traits import BARE, BUFFERS, NESTED, SUBCLASS
from ..verdict import Broken, NotApplicable, bytes_text

#: Sets something up and gives back what must stay alive, and the names that a report must list.
Setup = Callable[[Case], tuple[Any, list[str]]]


def _smallest(case: Case) -> str:
    """A weight without which there is still enough to be worth parking."""
    return min(case.plain_weights(), key=lambda name: case.before.records[name].storage_bytes)


def _view_elsewhere(case: Case) -> tuple[Any, list[str]]:
    name = _smallest(case)
    case.note(f"a view of {name} is held elsewhere")
    return case.module.get_parameter(name).detach()[...], [name]  # of all of it, because it may have no dimension


def _cached_attribute(case: Case) -> tuple[Any, list[str]]:
    name = _smallest(case)
    owner, leaf = case.owner(name)
    case.note(f"{name}.data is kept in an attribute of its module")
    owner.__dict__[f"cached_{leaf}"] = case.module.get_parameter(name).detach()
    return None, [name]


def _plain_attribute(case: Case) -> tuple[Any, list[str]]:
    case.note("the module has a tensor in a plain attribute, lookup_table")
    case.module.__dict__["lookup_table"] = ramp(64, device=case.device.device)
    return None, ["lookup_table"]


def _on_the_host(case: Case) -> tuple[Any, list[str]]:
    name = _smallest(case)
    weight = case.module.get_parameter(name)
    case.note(f"{name} is on the host already")
    weight.data = weight.data.cpu()
    return None, [name]


LEFT: dict[str, Any] = {
    "a view elsewhere": _view_elsewhere,
    "a cached attribute": _cached_attribute,
    "a plain tensor attribute": _plain_attribute,
    "a weight on the host already": _on_the_host,
}


@promise(
    29,
    "the report says which bytes really came free, and names what was not parked or not freed",
    cause="the report adds up the sizes of what was meant to be parked; a view elsewhere keeps the bytes alive",
    reports=("RLinf/RLinf/issues/1094", "vllm-project/vllm/pull/11743", "vllm-project/vllm/issues/29341"),
    variants=LEFT,
    on=NESTED,
)
def check_the_report_names_what_was_left(case: Case, setup: Setup) -> None:
    if len(case.plain_weights()) < 2:
        raise NotApplicable("fewer than two floating-point weights that are alone in their storages")
    held, names = setup(case)
    _expect_true_report(case, names)
    del held


@promise(
    29,
    "every non-layer weight is parked or named as skipped, also parameters that are in no layer",
    cause="""weights are collected layer by layer, or by the classes of layers; what a model has beside them (register
        tokens, scales) is no part of that""",
    reports=("Comfy-Org/ComfyUI/pull/15268",),
    on=BARE,
)
def check_every_weight_is_parked_or_named(case: Case) -> None:
    weights = [name for name in case.weights() if name in case.before.records and case.before.records[name].bits]
    report = case.report(case.park())
    named = [name for name, _ in report.skipped] if report is not None else []
    parked = case.parked_weights()
    left = [name for name in weights if name not in parked and not any(name in other for other in named)]
    if left:
        raise Broken(
            expected="every non-layer weight parked, or named as skipped",
            seen=f"{', '.join(left)} on the device as before; skipped: {', '.join(named) or 'nothing'}",
            names=left,
        )


@promise(
    29,
    "the report names the buffers that stay on the device",
    cause="buffers are forgotten, because they are not parameters",
    reports=("vllm-project/vllm/pull/16889", "huggingface/diffusers/pull/13238"),
    on=BUFFERS,
)
def check_the_report_names_the_buffers(case: Case) -> None:
    device = case.device.device
    _expect_true_report(
        case, [name for name, buffer in case.module.named_buffers() if buffer.device == device and buffer.numel()]
    )


@promise(
    29,
    "the report names a wrapper subclass that could not be parked, and its bytes are not counted as freed",
    cause="the bytes of a wrapper are computed from its outer shape, though assigning .data to it frees nothing",
    reports=("huggingface/diffusers/pull/13276", "huggingface/diffusers/issues/12610"),
    on=SUBCLASS,
)
def check_the_report_is_true_for_wrapper_subclasses(case: Case) -> None:
    _expect_true_report(case, [])


def _expect_true_report(case: Case, names: Iterable[str]) -> None:
    on_device = dict(case.module.named_buffers())
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in on_device.items()}
    before = case.device.settled_bytes()
    report = case.stated_report(case.park())
    freed = before - case.device.settled_bytes()
    if case.device.exact and report.bytes_freed != freed:
        raise Broken(
            expected=f"{bytes_text(freed)} reported as freed, which is what came free",
            seen=bytes_text(report.bytes_freed),
            names=[f"{name} ({reason})" for name, reason in report.skipped],
        )
    listed = [name for name, _ in report.skipped]
    moved = {name for name, address in storages.items() if on_device[name].untyped_storage().data_ptr() != address}
    missing = [name for name in names if name not in moved and not any(name in other for other in listed)]
    if missing:
        raise Broken(
            expected=f"{', '.join(missing)} among what was skipped, with the reason",
            seen=f"skipped: {', '.join(f'{name} ({reason})' for name, reason in report.skipped) or 'nothing'}",
            names=missing,
        )
    case.restore()
    case.expect_same("values")


CYCLES = 50


@promise(
    30,
    "fifty cycles leave device bytes, host bytes, live tensors and copies per cycle constant",
    cause="every cycle adds a host copy, a hook, or a tensor that something still refers to",
    reports=("vllm-project/vllm/issues/21336", "huggingface/diffusers/issues/7970", "Comfy-Org/ComfyUI/issues/11775"),
)
def check_fifty_cycles_add_nothing(case: Case) -> None:
    def measure() -> dict[str, int]:
        if case.device.is_fake:
            case.device.fake.clear_transfers()
        case.cycle()
        copies = len(case.device.fake.transfers) if case.device.is_fake else 0
        seen = {
            "device bytes": case.device.settled_bytes(),
            "host bytes": host.bytes(),
            "live tensors": host.tensors(),
            "copies in a cycle": copies,
        }
        counted = case.parkable.host_bytes
        return seen if counted is None else seen | {"host bytes as the implementation counts them": counted()}

    host = HostLedger()
    for _ in range(3):  # the first cycles may set things up
        case.cycle()
    early = measure()
    park, restore = case.parkable.park, case.parkable.restore
    case.scarce(times=2)
    for _ in range(CYCLES - 5):
        park()
        restore()
    case.history.append(f"{CYCLES - 5} cycles more")
    late = measure()
    grown = {what: (early[what], late[what]) for what in early if early[what] != late[what]}
    if grown:
        raise Broken(
            expected=f"the same after cycle {CYCLES} as after cycle 4",
            seen="; ".join(f"{what} {then:,} became {now:,}" for what, (then, now) in grown.items()),
        )


@promise(
    31,
    "host bytes after restore are what the stated policy says",
    cause="the copies are kept after restore by an implementation that means to drop them, or the other way round",
    reports=("huggingface/diffusers/issues/7970",),
)
def check_host_bytes_follow_the_policy(case: Case) -> None:
    kept = case.parkable.keeps_host_copies
    if kept is None:
        raise NotApplicable("Parkable(keeps_host_copies=...) is not declared")
    host = HostLedger()
    before = host.bytes()
    case.cycle()
    after = host.bytes() - before
    if not kept and after > 0:
        raise Broken(
            expected="no host copies after restore, as Parkable(keeps_host_copies=False) says",
            seen=f"{bytes_text(after)} of them",
        )
    if kept and not 0 < after <= case.bytes:
        raise Broken(expected=f"host copies of up to {bytes_text(case.bytes)} after restore", seen=bytes_text(after))


@promise(
    31,
    "no host bytes are left after parking was ended",
    cause="the copies live in a global table, or in a closure that a hook keeps",
    reports=("vllm-project/vllm/issues/36651",),
)
def check_no_host_bytes_are_left_at_the_end(case: Case) -> None:
    if not case.parkable.ends:
        raise NotApplicable("Parkable(ends={'close': ...}) is not declared")
    host = HostLedger()
    before = host.bytes()
    case.cycle()
    case.park()
    case.device.relieve()
    label, end = list(case.parkable.ends.items())[-1]
    refused = case.attempt(label, end)
    if refused is not None:
        case.restore()
        refused = case.attempt(label, end)
    after = host.bytes() - before
    if refused is not None:
        raise NotApplicable(f"{label} is refused: {refused}")
    if after > 0:
        raise Broken(expected=f"no host copies after {label}", seen=f"{bytes_text(after)} of them")


@promise(
    31,
    "the implementation's own count of its host bytes is right in every state, and zero in the end",
    cause="""the count follows the state (parked or not) and not the copies, so that copies which are kept after
        restore, or left behind at the end, are not in it""",
    reports=("sgl-project/sglang/pull/35641", "sgl-project/sglang/pull/40439"),
)
def check_the_counted_host_bytes_are_true_in_every_state(case: Case) -> None:
    counted = case.parkable.host_bytes
    if counted is None:
        raise NotApplicable("Parkable(host_bytes=...) is not declared")
    host = HostLedger()
    at_first = counted() - host.bytes()

    def expect(state: str) -> None:
        assert counted is not None
        true, seen = at_first + host.bytes(), counted()
        if seen != true:
            raise Broken(expected=f"{bytes_text(true)} of host copies {state}", seen=f"{bytes_text(seen)} are counted")

    for number in ("first", "second"):
        case.park()
        expect(f"after the {number} park")
        case.restore()
        expect(f"after the {number} restore")
    if not case.parkable.ends:
        return
    label, end = list(case.parkable.ends.items())[-1]
    case.park()
    case.device.relieve()
    if case.attempt(label, end) is not None:
        case.restore()
        if (refused := case.attempt(label, end)) is not None:
            raise NotApplicable(f"{label} is refused: {refused}")
    if not case.streamed:  # the host store of the layers goes at the end, too, and is no host copy of ours
        expect(f"after {label}")
    if left := counted():
        raise Broken(expected=f"no host copies after {label}", seen=f"{bytes_text(left)} are counted")
