"""C38: two threads at once, at every point where one can get in the way of the other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..case import Case, flat_tensors, output_difference
from ..registry import promise
from ..verdict import Broken, bytes_text, error_text

MOST_POINTS = 8


class Pause(TorchFunctionMode):
    """Calls *then* once, before the *at*-th call of torch in this thread, and counts the calls."""

    def __init__(self, at: int = 0, then: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.calls = 0
        self._at = at
        self._then = then

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self._at and self._then is not None:
            self._then()
        return function(*args, **(kwargs or {}))


class Second(threading.Thread):
    """The thread that gets in the way, and what came of it."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._action = action
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.result = self._action()
        except BaseException as error:
            self.error = error

    def until_done_or_waiting(self) -> None:
        """Returns when the thread has ended, or makes no progress any more: then it waits for the first thread."""
        last: Any = None
        same = 0
        while self.is_alive() and same < 5:
            frame = sys._current_frames().get(self.ident or 0)
            now = (frame.f_code, frame.f_lasti) if frame is not None else None
            same = same + 1 if now == last and self._is_asleep() else 0
            last = now
            self.join(0.001)

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
    for first in ("park", "restore")
    for second in ("park", "restore", "forward")
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
        "forward": lambda: flat_tensors(case.parkable.call()),
    }
    case.cycle()
    _begin(case, meeting.first)
    counter = Pause()
    with counter:
        error = case.attempt(meeting.first, actions[meeting.first])
    if error is not None:
        raise Broken(expected=f"{meeting.first}() returns", seen=error_text(error))
    points = sorted({1 + step * (counter.calls - 1) // (MOST_POINTS - 1) for step in range(MOST_POINTS)})
    for point in points:
        _begin(case, meeting.first)
        label = f"{meeting.second} by a second thread at call {point} of {counter.calls} of torch in {meeting.first}"
        case.history.append(label)
        second = Second(actions[meeting.second])

        def meet(second: Second = second) -> None:
            second.start()
            second.until_done_or_waiting()

        first_error: BaseException | None = None
        try:
            with Pause(point, meet):
                actions[meeting.first]()
        except Exception as error:
            first_error = error
        if second.ident is None:
            second.start()
        second.join(10)
        if second.is_alive():
            raise Broken(expected="both threads come to an end", seen=f"a deadlock: {label}")
        _expect_untorn(case, meeting, second, first_error, label)


def _begin(case: Case, verb: str) -> None:
    """The state that the verb starts from. Memory stays scarce; what a park freed is there for the restore."""
    case.restore()
    if verb == "restore":
        case.scarce(times=2)
        case.attempt("park", case.parkable.park)
    else:
        case.scarce(times=2)


def _expect_untorn(case: Case, meeting: Meeting, second: Second, first_error: BaseException | None, label: str) -> None:
    if meeting.second == "forward" and second.error is None:
        wrong = output_difference(case.expected_output, second.result)
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
