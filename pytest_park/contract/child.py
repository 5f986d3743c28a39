"""Checks in a process of their own: a crash there is a finding, and not the end of the test run."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from typing import IO, Any

import torch

from .case import Case
from .verdict import Broken, Hangs, NotApplicable, Untestable

#: Seconds after the last step of its history after which a child counts as hanging.
PATIENCE = 30


def can_fork(case: Case) -> bool:
    """A real accelerator does not survive a fork."""
    return case.device.is_fake and hasattr(os, "fork")


def run_in_child(case: Case, run: Callable[[], None]) -> None:
    """Run a check in a forked process, and raise here what it raised there.

    `Broken` if the process died, `Hangs` if it did not come to an end.
    """
    if not can_fork(case):
        raise NotApplicable(
            "may crash the process, and a real accelerator does not survive a fork: use the fake device"
        )
    _import_what_torch_imports_late()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the child has its own only
        child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                _be_child(case, run, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    outcome: tuple[Any, ...] | None = None
    with os.fdopen(reading, "rb") as pipe:
        while True:
            try:
                kind, *rest = pickle.load(pipe)
            except EOFError:
                break
            if kind == "step":
                case.history.extend(rest)
            else:
                outcome = (kind, *rest)
    _, status = os.waitpid(child, 0)
    if outcome is None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        raise Hangs(f"the child process did nothing for {PATIENCE} seconds", after=case.history[-1:])
    if outcome is None:
        died = f"of {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else f"with status {status}"
        raise Broken(expected="the process survives", seen=f"it died {died} after the last step of the history")
    _raise(*outcome)


def _import_what_torch_imports_late() -> None:
    """Some functions of torch import its compiler at their first call; every child would do that anew, in seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._dynamo")


class _Told(list[str]):
    """A history whose steps are told to the parent as they happen, so that they are known after a crash."""

    def __init__(self, history: list[str], pipe: IO[bytes]) -> None:
        super().__init__(history)
        self._pipe = pipe

    def append(self, step: str, /) -> None:
        super().append(step)
        pickle.dump(("step", step), self._pipe)
        self._pipe.flush()
        signal.alarm(PATIENCE)


def _be_child(case: Case, run: Callable[[], None], pipe: IO[bytes]) -> None:
    import resource  # not on every system, but where there is fork

    faulthandler.disable()  # a crash is reported by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler of the parent, such as of a timeout plugin, is not for us
    signal.alarm(PATIENCE)
    torch.set_num_threads(1)  # before any operation: OpenMP's thread pool does not survive a fork
    case.history = _Told(case.history, pipe)
    try:
        run()
    except Broken as broken:
        outcome: tuple[Any, ...] = ("broken", broken.expected, broken.seen, broken.names)
    except NotApplicable as reason:
        outcome = ("not applicable", str(reason))
    except Untestable as reason:
        outcome = ("untestable", str(reason))
    except BaseException as error:
        outcome = ("error", f"{type(error).__name__}: {error}")
    else:
        outcome = ("kept",)
    pickle.dump(outcome, pipe)


def _raise(kind: str, *rest: Any) -> None:
    match kind:
        case "broken":
            expected, seen, names = rest
            raise Broken(expected=expected, seen=seen, names=names)
        case "not applicable":
            raise NotApplicable(*rest)
        case "untestable":
            raise Untestable(*rest)
        case "error":
            raise RuntimeError(*rest)
