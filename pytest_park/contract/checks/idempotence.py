"""C5 to C10: the verbs can be repeated, and the state is what the records say."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..case import Case
from ..registry import promise
from ..verdict import Broken, NotApplicable, bytes_text


@dataclass(frozen=True)
class Repeats:
    """How often to park, and the headroom before the last ones as a function of the case."""

    times: int
    headroom: str

    def bytes(self, case: Case) -> int | None:
        weights = case.weights().values()
        return {
            "no headroom": 0,
            "ten times the placeholders": 10 * sum(weight.element_size() for weight in weights),
            "ten times the weights": 10 * case.bytes,
            "huge headroom": None,
        }[self.headroom]


HEADROOMS = ("no headroom", "ten times the placeholders", "ten times the weights", "huge headroom")
REPEATS = {f"{times} parks, {headroom}": Repeats(times, headroom) for times in (1, 2, 3) for headroom in HEADROOMS}


@promise(
    5,
    "parking again keeps the memory free and loses nothing, with any headroom in between",
    cause="""the second park measures the placeholders instead of the weights, finds that there is room, and drops
        the only copy; or, to be safe, brings everything back into memory that is not there""",
    reports=("sgl-project/sglang/issues/38166", "vllm-project/vllm/issues/36651"),
    variants=REPEATS,
)
def check_a_second_park_keeps_the_memory_free(case: Case, repeats: Repeats) -> None:
    most = case.device.bytes
    for number in range(repeats.times):
        if number == 0 and repeats.times > 1:
            case.park()
        else:
            _park_again(case, repeats.bytes(case), most, first=number == 0)
        most = case.device.bytes
    case.restore()
    case.expect_same(after=f"{repeats.times} parks with {repeats.headroom} and a restore")
    case.expect_output(after=f"{repeats.times} parks with {repeats.headroom} and a restore")


def _park_again(case: Case, headroom: int | None, most: int, *, first: bool) -> None:
    if headroom is None:
        case.device.relieve()
    else:
        case.device.set_headroom(headroom)
    case.history.append("a huge headroom" if headroom is None else f"headroom {bytes_text(headroom)}")
    allocations = case.device.allocations
    error = case.attempt("park", case.parkable.park)
    if error is not None and not first:
        raise Broken(expected="a repeated park does nothing", seen=f"it raised {type(error).__name__}: {error}")
    new = case.device.allocations - allocations
    case.expect_bytes(at_most=most, what="no more than before the repeated park")
    if new and not first:
        raise Broken(expected="a repeated park allocates nothing on the device", seen=f"{new} allocations")


@promise(
    6,
    "restoring again makes no allocation and no copy, and no address changes",
    cause="restore does not ask whether the weights are there already",
    reports=("fzyzcjy/torch_memory_saver/issues/92",),
    variants={"after a cycle": True, "before the first park": False},
)
def check_a_second_restore_does_nothing(case: Case, after_a_cycle: bool) -> None:
    if after_a_cycle:
        case.cycle()
    addresses = sorted(case.storages())
    if case.device.is_fake:
        case.device.fake.clear_transfers()
    allocations = case.device.allocations
    case.restore()
    if case.device.allocations > allocations:
        raise Broken(
            expected="no allocation in a repeated restore", seen=f"{case.device.allocations - allocations} allocations"
        )
    copies = list(case.device.fake.transfers) if case.device.is_fake else []
    if copies:
        raise Broken(
            expected="no copy in a repeated restore",
            seen=f"{len(copies)} copies of {bytes_text(sum(copy.bytes for copy in copies))}",
        )
    if sorted(case.storages()) != addresses:
        raise Broken(expected="every weight at the same address", seen="addresses changed", names=case.weights())
    case.expect_same(after="a repeated restore")


@promise(
    7,
    "no sequence of parks, restores, forwards and failures, with any headroom, loses the last copy",
    cause="a copy is dropped on the strength of a flag or a measurement that an earlier failure or repeat has made "
    "wrong",
    reports=("sgl-project/sglang/issues/38166", "radixark/miles/issues/1958"),
    variants={f"walk {seed}": seed for seed in range(4)},
    in_child="if possible",
)
def check_no_walk_loses_a_weight(case: Case, seed: int) -> None:
    walk = random.Random(seed)
    case.history.append("a random walk:")
    for _ in range(20):
        verb = walk.choice(("park", "park", "restore", "forward"))
        headroom = walk.choice((0, case.bytes, 10 * case.bytes, None))
        if headroom is None or verb != "park":
            case.device.relieve()
        else:
            case.device.set_headroom(headroom)
        label = verb if verb != "park" else f"park (headroom {'huge' if headroom is None else bytes_text(headroom)})"
        if case.device.is_fake and walk.random() < 0.4:
            kind = walk.choice(("allocation", "host copy", "device copy"))
            case.device.arm(kind, after := walk.randint(1, 4))
            label += f" (fails at {kind} {after})"
        action = {"park": case.parkable.park, "restore": case.parkable.restore, "forward": case.forward}[verb]
        case.attempt(label, action)
        case.device.disarm()
    case.restore()
    case.expect_same(after="the walk")
    case.expect_output(after="the walk")


@promise(
    8,
    "the implementation's own count of the weights' bytes is right in every state",
    cause="sizes are read from the parameters, which are placeholders while parked",
    reports=("sgl-project/sglang/issues/38166",),
)
def check_the_counted_bytes_are_true_in_every_state(case: Case) -> None:
    counted = case.parkable.weight_bytes
    if counted is None:
        raise NotApplicable("Parkable(weight_bytes=...) is not declared")

    def expect(state: str) -> None:
        assert counted is not None
        if (seen := counted()) != case.bytes:
            raise Broken(expected=f"{bytes_text(case.bytes)} {state}", seen=bytes_text(seen), names=case.before.records)

    expect("before the first park")
    case.park()
    expect("while parked")
    case.park()
    expect("while parked, after a second park")
    case.restore()
    expect("after restore")


@promise(
    8,
    "the bytes in a report are those that really came free, also the second time",
    cause="the report adds up what was meant to be freed; a second park reports the same bytes again",
    reports=("vllm-project/vllm/pull/11743",),
)
def check_the_reported_bytes_are_true_in_every_state(case: Case) -> None:
    for state in ("the first park", "a second park", "a park after a cycle"):
        before = case.device.bytes
        report = case.stated_report(case.park())
        freed = before - case.device.settled_bytes()
        if report.bytes_freed != freed and case.device.exact:
            raise Broken(expected=f"{bytes_text(freed)} reported for {state}", seen=bytes_text(report.bytes_freed))
        if state == "a second park":
            case.restore()


@promise(
    9,
    "parking works with no device memory left, or fails before it changes anything",
    cause="placeholders, fingerprints or staging buffers are allocated on the device that is full",
    reports=("sgl-project/sglang/pull/32600",),
    variants={"the first park": False, "a park after a cycle": True},
)
def check_parking_needs_no_device_memory(case: Case, after_a_cycle: bool) -> None:
    if after_a_cycle:
        case.cycle()
    before = case.device.bytes
    case.device.set_headroom(0)
    error = case.attempt("park without headroom", case.parkable.park)
    if error is not None:
        if case.device.settled_bytes() != before:
            raise Broken(
                expected=f"{bytes_text(before)} on the device after a park that failed, as before it",
                seen=f"{bytes_text(case.device.bytes)} ({type(error).__name__})",
            )
        case.device.relieve()
        case.expect_same(after="a park that failed for want of device memory")
    elif case.device.settled_bytes() >= before:
        raise Broken(
            expected="park() frees memory, or raises, when there is none left",
            seen=f"it returned, and there are {bytes_text(case.device.bytes)} on the device as before",
        )
    case.restore()
    case.expect_same()


@promise(
    10,
    "the second end-of-use call of a request frees or does nothing: it never restores and never raises",
    cause="the end of the request ends the use again, and the second call takes its own placeholders for resident "
    "weights",
    reports=("sgl-project/sglang/issues/38166", "huggingface/diffusers/issues/11376"),
    variants={headroom: Repeats(2, headroom) for headroom in HEADROOMS},
)
def check_the_second_end_of_use_restores_nothing(case: Case, repeats: Repeats) -> None:
    parkable = case.parkable
    if parkable.finish_use is None or parkable.finish_request is None:
        raise NotApplicable("Parkable(finish_use=..., finish_request=...) are not declared")
    if parkable.begin_use is not None:
        case.attempt("begin_use", parkable.begin_use)
    case.forward()
    case.scarce()
    case.attempt("finish_use", parkable.finish_use)
    before = case.device.bytes
    headroom = repeats.bytes(case)
    if headroom is None:
        case.device.relieve()
    else:
        case.device.set_headroom(headroom)
    error = case.attempt("finish_request", parkable.finish_request)
    if error is not None:
        raise Broken(expected="finish_request returns", seen=f"{type(error).__name__}: {error}")
    case.expect_bytes(at_most=before, what="no more than after the first end of use")
    case.restore()
    case.expect_same(after="both ends of the use and a restore")
