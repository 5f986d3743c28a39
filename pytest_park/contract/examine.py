"""Running checks without pytest: `check` for programs, `examine` for the whole table."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import signal
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .case import Case, adopt
from .host import set_aside, swift_collector
from .parkable import Parkable
from .probes import Trait
from .registry import Check, all_checks
from .verdict import Broken, Finding, NotApplicable, Untestable, Verdict, error_text

ParkableFactory = Callable[[], Parkable]


def check(parkable_factory: ParkableFactory, *, only: Iterable[str] = ()) -> list[Finding]:
    """The promises that a parkable breaks, each with a diagnosis; empty if it keeps all that apply to it.

    *parkable_factory* returns a `Parkable` over a new module at each call. *only* selects checks by parts of their
    ids or by family.
    """
    return [verdict.finding for verdict in examine(parkable_factory, only=only) if verdict.finding is not None]


def examine(parkable_factory: ParkableFactory, *, only: Iterable[str] = ()) -> list[Verdict]:
    """The verdict of each check (and each of its variants) on the parkable."""
    checks = [one for one in all_checks() if _selected(one, tuple(only))]
    verdicts: list[Verdict] = []
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    with swift_collector():
        for one in checks:
            for variant in one.variants or (None,):
                verdict = judge(one, variant, lambda: _fresh(parkable_factory, seen))
                verdicts.append(verdict)
                if verdict.outcome == "untestable":
                    return verdicts
    return verdicts


def judge(one: Check, variant: str | None, parkable_factory: ParkableFactory) -> Verdict:
    """The verdict of one check, in one variant, on one new parkable."""
    label = one.id if variant is None else f"{one.id}[{variant}]"

    def verdict(outcome: Any, reason: str = "", finding: Finding | None = None) -> Verdict:
        return Verdict(one.promise, label, one.title, outcome, reason, finding)

    def finding(broken: Broken, history: Iterable[str]) -> Finding:
        return Finding(
            promise=one.promise,
            check=label,
            title=one.title,
            expected=broken.expected,
            seen=broken.seen,
            names=broken.names,
            history=tuple(history),
            cause=one.cause,
            reports=one.reports,
        )

    history: list[str] = []
    is_own = True
    try:
        parkable = parkable_factory()
        subject = _subject(one, variant, parkable)
        is_own = subject is parkable
        with Case(subject) as case:
            history = case.history
            if one.in_child == "only" or (one.in_child == "if possible" and can_fork(case)):
                _in_child(lambda: one.run(case, variant), case)
            else:
                one.run(case, variant)
    except NotApplicable as reason:
        return verdict("not applicable", str(reason))
    except Untestable as reason:
        # What cannot be done with the user's module makes all checks pointless; with a probe it is an answer.
        expected = "a parkable that can be tested" if is_own else "that this module can be parked and restored"
        untestable = Broken(expected=expected, seen=str(reason))
        return verdict("untestable" if is_own else "broken", str(reason), finding(untestable, history))
    except Broken as broken:
        return verdict("broken", broken.seen, finding(broken, history))
    except Exception as error:
        unexpected = Broken(expected="no error at this point of the check", seen=error_text(error))
        return verdict("broken", unexpected.seen, finding(unexpected, history))
    return verdict("kept")


def _subject(one: Check, variant: str | None, parkable: Parkable) -> Parkable:
    """The parkable itself, or a probe made parkable in its way where it lacks what the check is about."""
    value = one.variants[variant] if variant is not None else None
    trait = value if isinstance(value, Trait) else one.on
    if trait is None or trait.found_in(parkable):
        return parkable
    if parkable.adopt is None:
        raise NotApplicable(
            f"no {trait.name} in {type(parkable.module).__name__} (declare Parkable(adopt=...) to try a probe)"
        )
    probe = trait.probe(parkable.device)
    return adopt(parkable, probe.module, probe.inputs, probe.streamed)


def _selected(one: Check, only: tuple[str, ...]) -> bool:
    return not only or one.promise == 0 or any(word in one.id or word == one.family for word in only)


def _fresh(factory: ParkableFactory, seen: weakref.WeakSet[nn.Module]) -> Parkable:
    """A new parkable; one whose module was there before is refused, because the checks before have changed it."""
    set_aside()
    parkable = factory()
    if parkable.module in seen:
        raise Untestable(
            "the factory returned the same module again: build a new module at each call, because checks change it"
        )
    seen.add(parkable.module)
    return parkable


def can_fork(case: Case) -> bool:
    """A real accelerator does not survive a fork."""
    return case.device.is_fake and hasattr(os, "fork")


def _in_child(run: Callable[[], None], case: Case) -> None:
    """Run in a forked process: a crash there is a finding and not the end of the test run."""
    if not can_fork(case):
        raise NotApplicable("may crash the process and a real accelerator does not survive a fork: use the fake device")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the child runs its own only
        child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()  # a crash is reported by the parent
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.close(reading)
            torch.set_num_threads(1)  # OpenMP's thread pool does not survive a fork
            signal.alarm(60)
            outcome: BaseException | None = None
            try:
                run()
            except BaseException as error:
                outcome = error
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(_packed(outcome, case.history))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) or not data:
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {status}"
        raise Broken(expected="the process survives", seen=f"it died with {name}")
    kind, expected, seen, names, case.history[:] = pickle.loads(data)
    if kind == "broken":
        raise Broken(expected=expected, seen=seen, names=names)
    if kind == "not applicable":
        raise NotApplicable(seen)
    if kind == "untestable":
        raise Untestable(seen)
    if kind == "error":
        raise RuntimeError(seen)


def _packed(outcome: BaseException | None, history: list[str]) -> bytes:
    match outcome:
        case None:
            packed: tuple[Any, ...] = ("kept", "", "", (), history)
        case Broken():
            packed = ("broken", outcome.expected, outcome.seen, outcome.names, history)
        case NotApplicable():
            packed = ("not applicable", "", str(outcome), (), history)
        case Untestable():
            packed = ("untestable", "", str(outcome), (), history)
        case _:
            packed = ("error", "", f"{type(outcome).__name__}: {outcome}", (), history)
    return pickle.dumps(packed)
