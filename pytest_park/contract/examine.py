"""Running checks without pytest: `check` for programs, `examine` for the whole table."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .case import ADOPTED, Case, adopt
from .child import can_fork, run_in_child
from .host import set_aside, swift_collector
from .parkable import Parkable
from .registry import Check, all_checks, first_check
from .traits import Trait
from .verdict import Broken, Finding, Hangs, NotApplicable, Outcome, Untestable, Verdict, error_text

ParkableFactory = Callable[[], Parkable]


def check(parkable_factory: ParkableFactory, *, only: Iterable[str] = ()) -> list[Finding]:
    """The promises that a parkable breaks, each with a diagnosis; empty if it keeps all that apply to it.

    *parkable_factory* returns a `Parkable` over a new module at each call. *only* selects checks by parts of their
    ids or by family; ValueError if a word of it selects none.
    """
    return [verdict.finding for verdict in examine(parkable_factory, only=only) if verdict.finding is not None]


def examine(parkable_factory: ParkableFactory, *, only: Iterable[str] = ()) -> list[Verdict]:
    """The verdict of each check (and each of its variants) on the parkable; *only* as for `check`."""
    checks = select(only)
    verdicts: list[Verdict] = []
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    with swift_collector():
        for one in checks:
            for variant in one.variants or (None,):
                verdict = judge(one, variant, lambda: _fresh(parkable_factory, seen), repeats=bool(verdicts))
                verdicts.append(verdict)
                if verdict.outcome == "untestable":
                    return verdicts
    return verdicts


def judge(one: Check, variant: str | None, parkable_factory: ParkableFactory, *, repeats: bool = False) -> Verdict:
    """The verdict of one check, in one variant, on one new parkable.

    *repeats* says that one like it was judged before, so that its forward is known not to be random.
    """
    label = one.label(variant)

    def verdict(outcome: Outcome, reason: str = "", finding: Finding | None = None) -> Verdict:
        return Verdict(one.promise, label, one.title, outcome, reason, finding)

    def finding(broken: Broken, history: Iterable[str], outcome: Outcome = "broken") -> Finding:
        return Finding(
            promise=one.promise,
            check=label,
            title=one.title,
            expected=broken.expected,
            seen=broken.seen,
            names=broken.names,
            history=tuple(history),
            cause=one.cause if outcome != "untestable" else "",
            reports=one.reports if outcome != "untestable" else (),
            outcome=outcome,
            module=about if case is None else case.about,
        )

    history: list[str] = []
    case: Case | None = None
    about = ""
    try:
        parkable = parkable_factory()
        subject, about = _subject(one, variant, parkable)
        with Case(subject, about, repeats=repeats) as case:
            history = case.history
            if one.in_child == "only" or (one.in_child == "if possible" and can_fork(case)):
                run_in_child(case, lambda: one.run(case, variant))
            else:
                one.run(case, variant)
    except NotApplicable as reason:
        return verdict("not applicable", str(reason))
    except Hangs as reason:
        hanging = Broken(
            expected="the check comes to an end",
            seen=f"{reason}. Either the implementation waits there for ever, or for a lock or a thread that was in use "
            "when the process was forked: look there with OMP_NUM_THREADS=1 and with no other threads",
        )
        return verdict("hangs", str(reason), finding(hanging, history, "hangs"))
    except Untestable as reason:
        # What cannot be done with the user's module makes all checks pointless; with a probe it is an answer.
        expected = "that this module can be parked and restored" if about else first_check().title
        untestable = Broken(expected=expected, seen=str(reason))
        outcome: Outcome = "broken" if about else "untestable"
        return verdict(outcome, str(reason), finding(untestable, history, outcome))
    except Broken as broken:
        return verdict("broken", broken.seen, finding(broken, history))
    except Exception as error:
        unexpected = Broken(expected="no error at this point of the check", seen=error_text(error))
        return verdict("broken", unexpected.seen, finding(unexpected, history))
    return verdict("kept")


def _subject(one: Check, variant: str | None, parkable: Parkable) -> tuple[Parkable, str]:
    """The parkable itself, or a probe made parkable in its way where it lacks what the check is about; and then, what
    that probe is."""
    value = one.variants[variant] if variant is not None else None
    trait = value if isinstance(value, Trait) else getattr(value, "on", one.on)
    if trait is None or trait.found_in(parkable):
        return parkable, ""
    if parkable.adopt is None:
        raise NotApplicable(
            f"no {trait.name.removeprefix('a ')} in {type(parkable.module).__name__}"
            " (declare Parkable(adopt=...) to try a probe)"
        )
    probe = trait.probe(parkable.device)
    return adopt(parkable, probe.module, probe.inputs, probe.streamed), ADOPTED.format(f"with {trait.name}")


def select(only: Iterable[str]) -> list[Check]:
    """The checks that these words select (all, if there are no words), and the first one, which is always asked."""
    checks, words = all_checks(), list(only)
    found = {word: [one for one in checks if word in one.id or word == one.family] for word in words}
    for word, selected in found.items():
        if not selected:
            families = ", ".join(sorted({one.family for one in checks}))
            raise ValueError(f"no check has {word!r} in its name, and the families are {families}")
    return [one for one in checks if not words or one.promise == 0 or any(one in some for some in found.values())]


def _fresh(factory: ParkableFactory, seen: weakref.WeakSet[nn.Module]) -> Parkable:
    set_aside()
    try:
        given = factory()
    except (NotApplicable, Untestable):
        raise
    except Exception as error:
        raise Untestable(f"the factory raised {error_text(error)}") from error
    return usable(given, "the factory", seen)


def usable(given: Any, source: str, seen: weakref.WeakSet[nn.Module]) -> Parkable:
    """What *source* gave, if it is a parkable over a module that is not among those *seen*; `Untestable` otherwise."""
    if not isinstance(given, Parkable):
        raise Untestable(f"{source} returned {type(given).__name__}, not a Parkable")
    if fault := given.fault():
        raise Untestable(fault)
    if given.module in seen:
        raise Untestable(
            f"{source} returned the same module again: build a new one each time (a fixture with function scope does), "
            "because checks change it"
        )
    seen.add(given.module)
    return given
