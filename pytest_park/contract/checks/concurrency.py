"""C38: two threads at once, at every point where one can get in the way of the other."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..case import Case, flat_tensors, output_difference
from ..registry import promise
from ..verdict import Broken, bytes_text, error_text

#: Calls of torch that only ask something: nothing has changed after one of them that had not before.
QUESTIONS = {
    "__get__",
    "__hash__",
    "__len__",
    "_set_grad_enabled",
    "data_ptr",
    "detach",
    "device",
    "dim",
    "element_size",
}
QUESTIONS |= {"get_device", "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg"}
QUESTIONS |= {"is_pinned", "nelement", "numel", "size", "storage_offset", "stride", "untyped_storage"}
#: A component of a thousand weights has as many points; of more than these every so many-th is tried.
MOST_POINTS = 48


class Pause(TorchFunctionMode):
    """Calls *then* once, before the *at*-th call of torch in this thread, and lists the names of the calls."""

    def __init__(self, at: int = 0, then: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._at = at
        self._then = then

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        self.calls.append("an assignment to an attribute" if name == "__set__" else name)
        if len(self.calls) == self._at and self._then is not None:
            self._then()
        return function(*args, **(kwargs or {}))


def points(calls: Sequence[str]) -> list[int]:
    """Where a second thread can find something half done: before and after each call that allocates, copies or assigns.

    Numbers of calls, from 1; a point is *before* its call.
    """
    acts = [number for number, name in enumerate(calls, 1) if name not in QUESTIONS]
    found = sorted({1, *acts, *(number + 1 for number in acts if number < len(calls))})
    step = -(-len(found) // MOST_POINTS)
    return found[::step]


class Second(threading.Thread):
    """The thread that gets in the way, and what came of it."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._action()
        except BaseException as error:
            self.error = error

    def until_done_or_waiting(self) -> None:
        """Returns when the thread has ended, or makes no progress any more: then it waits for the first thread."""
        last: Any = None
        same = 0
        while self.is_alive() and same < 3:
            now = self._place()
            same = same + 1 if now == last and self._is_asleep() else 0
            last = now
            self.join(0.001)

    def ends(self) -> bool:
        """Whether it comes to an end now that nobody is in its way; not if it sleeps in one place for ten seconds."""
        place: Any = None
        still = 0
        while self.is_alive() and still < 10:
            self.join(1)
            now = self._place()
            still = still + 1 if now == place and self._is_asleep() else 0
            place = now
        return not self.is_alive()

    def _place(self) -> Any:
        """Where in the program it is, and how often the system let it run: on a busy machine it may stay where it is
        for long, and wait for nothing but its turn."""
        frame = sys._current_frames().get(self.ident or 0)
        try:
            with open(f"/proc/self/task/{self.native_id}/schedstat") as stat:
                turns = stat.read()
        except OSError:
            turns = ""  # not Linux, or it has just ended
        return (frame.f_code, frame.f_lasti, turns) if frame is not None else None

    def _is_asleep(self) -> bool:
        """Whether the system has nothing to do for the thread: one that only waits for a busy processor is not
        asleep."""
        try:
            with open(f"/proc/self/task/{self.native_id}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "S"
        except OSError:
            return True  # not Linux, or it has just ended


@dataclass(frozen=True)
class Meeting:
    """The verb of the first thread, which is stopped in its middle, and the one of the second."""

    first: str
    second: str


MEETINGS = {
    f"{second} in the middle of {first}": Meeting(first, second)
    for first, second in (
        *itertools.product(("park", "restore"), ("park", "restore", "forward")),
        ("forward", "park"),
    )
}


@promise(
    38,
    "two threads never tear the state: the second one waits or raises, and no forward gives a wrong value silently",
    cause="there is no lock, or forward does not take part in it",
    reports=(
        "huggingface/diffusers/issues/7891",
        "deepspeedai/DeepSpeed-MII/pull/176",
        "unslothai/unsloth/pull/6774",
    ),
    variants=MEETINGS,
    in_child="if possible",
)
def check_two_threads_do_not_tear_the_state(case: Case, meeting: Meeting) -> None:
    actions: dict[str, Callable[[], Any]] = {
        "park": case.parkable.park,
        "restore": case.parkable.restore,
        "forward": torch.no_grad()(lambda: flat_tensors(case.parkable.call())),
    }
    case.cycle()
    _begin(case, meeting.first)
    counter = Pause()
    with counter:
        error = case.attempt(meeting.first, actions[meeting.first])
    if error is not None:
        raise Broken(expected=f"{meeting.first}() returns", seen=error_text(error))
    for point in points(counter.calls):
        _begin(case, meeting.first)
        label = (
            f"{meeting.second} by a second thread before call {point} of {len(counter.calls)} of torch in "
            f"{meeting.first} ({counter.calls[point - 1]})"
        )
        case.history.append(label)
        second = Second(actions[meeting.second])

        def meet(second: Second = second) -> None:
            second.start()
            second.until_done_or_waiting()

        result: Any = None
        with contextlib.suppress(Exception), Pause(point, meet):
            result = actions[meeting.first]()  # it may raise: then it has noticed
        if second.ident is None:
            second.start()
        if not second.ends():
            raise Broken(expected="both threads come to an end", seen=f"a deadlock: {label}")
        outputs = {meeting.first: result, meeting.second: second.result}
        _expect_untorn(case, outputs.get("forward"), label)


def _begin(case: Case, verb: str) -> None:
    """The state that the verb starts from. Memory stays scarce; what a park freed is there for the restore."""
    case.restore()
    if verb == "restore":
        case.scarce(times=2)
        case.attempt("park", case.parkable.park)
    else:
        case.scarce(times=2)


def _expect_untorn(case: Case, output: list[torch.Tensor] | None, label: str) -> None:
    """*output* is that of the forward, if one took part and did not raise."""
    if output is not None:
        wrong = output_difference(case.expected_output, output)
        if wrong:
            raise Broken(expected=f"an error or the right output: {label}", seen=f"a result, and {wrong}")
    parked = case.device.settled_bytes()
    case.restore()
    found = case.before.differences(case.snapshot(), ("values", "device"))
    if found:
        raise Broken(
            expected=f"every weight comes back: {label}",
            seen="; ".join(found[:3]) + f" ({bytes_text(parked)} were on the device before the restore)",
            names=[line.split(":")[0] for line in found],
        )
    case.expect_output(after=label)
