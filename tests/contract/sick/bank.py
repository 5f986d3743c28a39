"""The register of the sick: every implementation with a fault, the checks it is meant for, and those that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .healthy import Healthy


@dataclass(frozen=True)
class Sick:
    """*meant* are the ids of the checks that exist for this fault; *follows* those that cannot but see it, too.

    One that *crashes* the process is examined in processes of its own wherever a check allows that.
    """

    implementation: type[Healthy]
    meant: frozenset[str]
    follows: frozenset[str]
    crashes: bool

    @property
    def name(self) -> str:
        return self.implementation.__name__


BANK: dict[str, Sick] = {}


def sick(*meant: str, follows: Iterable[str] = (), crashes: bool = False) -> Callable[[type[Healthy]], type[Healthy]]:
    """Put an implementation into the bank. Checks are named by their ids, or as far as that is unique."""

    def register(implementation: type[Healthy]) -> type[Healthy]:
        one = Sick(implementation, frozenset(meant), frozenset(follows), crashes)
        assert one.name not in BANK
        BANK[one.name] = one
        return implementation

    return register
