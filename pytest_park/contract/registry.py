"""The register of checks: one function per check, with the promise, the usual cause and the public reports beside it.

The tests of `ParkableContract`, `check` and the verdict table are all made from this register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .case import Case
    from .traits import Trait

CheckFunction = Callable[..., None]

#: Whether a check runs in a process of its own, because an implementation with the fault may crash: ``if possible`` (it
#: is on the fake device, not on a real one) or ``only``.
Child = Literal["no", "if possible", "only"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check. *variants* are its cases by name; a variant that is a `Trait`, or has one as *on*, chooses the module
    that it runs on, and then it is given the variant all the same."""

    promise: int
    title: str
    family: str
    name: str
    function: CheckFunction
    cause: str
    reports: tuple[str, ...]
    variants: Mapping[str, Any] = field(default_factory=dict)
    on: Trait | None = None
    in_child: Child = "no"

    @property
    def id(self) -> str:
        """Names the check everywhere: ``c05_a_second_park_keeps_the_memory_free``."""
        return f"c{self.promise:02}_{self.name}"

    def label(self, variant: str | None) -> str:
        """Names the check in one of its variants: ``c05_a_second_park_keeps_the_memory_free[2 parks, no headroom]``."""
        return self.id if variant is None else f"{self.id}[{variant}]"

    def labels(self) -> list[str]:
        """All of its variants, or the check itself where there are none."""
        return [self.label(variant) for variant in self.variants or (None,)]

    def run(self, case: Case, variant: str | None) -> None:
        if variant is None:
            self.function(case)
        else:
            self.function(case, self.variants[variant])


_CHECKS: dict[str, Check] = {}


def promise(
    number: int,
    title: str,
    *,
    cause: str,
    reports: Iterable[str] = (),
    variants: Mapping[str, Any] | None = None,
    on: Trait | None = None,
    in_child: Child = "no",
) -> Callable[[CheckFunction], CheckFunction]:
    """Register ``check_xxx(case)`` or ``check_xxx(case, variant)`` as a check of promise *number*.

    *on* is what the module must have for the check to mean something; *in_child* says where it runs.
    """

    def register(function: CheckFunction) -> CheckFunction:
        check = Check(
            promise=number,
            title=title,
            family=function.__module__.rpartition(".")[2],
            name=function.__name__.removeprefix("check_"),
            function=function,
            cause=" ".join(cause.split()),
            reports=tuple(reports),
            variants=dict(variants or {}),
            on=on,
            in_child=in_child,
        )
        if check.id in _CHECKS:
            raise ValueError(f"two checks are called {check.id}")
        _CHECKS[check.id] = check
        return function

    return register


def first_check() -> Check:
    """The one that asks whether the parkable can be tested at all."""
    return all_checks()[0]


def all_checks() -> list[Check]:
    """Every check, by number of its promise; the first ones ask whether the parkable can be tested at all."""
    from . import checks  # noqa: F401  (importing them registers them)

    return sorted(_CHECKS.values(), key=lambda check: check.promise)
