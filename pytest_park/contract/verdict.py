"""What a check can say: kept, broken (with a finding), not applicable, that it does not come to an end, or that the
parkable cannot be tested at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["kept", "broken", "not applicable", "hangs", "untestable"]

#: Where the public reports live; checks name them as ``owner/repository/issues/number``.
REPORTS = "https://github.com/"


class Broken(AssertionError):
    """A promise was not kept: what was *expected*, what was *seen*, and the *names* of the tensors it is about."""

    def __init__(self, *, expected: str, seen: str, names: Iterable[str] = ()) -> None:
        super().__init__(f"expected {expected}; seen: {seen}")
        self.expected = expected
        self.seen = seen
        self.names = tuple(names)


class NotApplicable(Exception):
    """The check says nothing about this parkable, for a reason that a person can read."""


class Hangs(Exception):
    """The check did not come to an end, so that nobody knows whether the promise is kept; *after* is its last step."""

    def __init__(self, what: str, after: Iterable[str] = ()) -> None:
        super().__init__(f"{what}; its last step: {', '.join(after) or 'none'}")


class Untestable(Exception):
    """The parkable itself is not usable, so that no check can say anything; tells what to do first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise, told to somebody who has not read the contract.

    *module* says which module it is about where that is not the user's own. *outcome* is ``hangs`` where the check did
    not end, and ``untestable`` where the parkable is no good.
    """

    promise: int
    check: str
    title: str
    expected: str
    seen: str
    names: tuple[str, ...]
    history: tuple[str, ...]
    cause: str
    reports: tuple[str, ...]
    outcome: Outcome = "broken"
    module: str = ""

    def __str__(self) -> str:
        headline = f"C{self.promise} is broken: {self.title}"
        if self.outcome == "hangs":
            headline = f"C{self.promise} is neither kept nor broken, the check hangs: {self.title}"
        elif self.outcome == "untestable":
            headline = "This parkable cannot be tested, so no promise is checked"
        lines = [headline, f"  expected: {self.expected}", f"  seen:     {self.seen}"]
        if self.module:
            lines.append(f"  module:   {self.module}")
        if self.names:
            lines.append(f"  names:    {shortened(self.names, ', ')}")
        if self.history:
            lines.append(f"  history:  {shortened(self.history, ' -> ', most=12)}")
        if self.cause:
            lines.append(f"  usual cause: {self.cause}")
        if self.reports:
            lines.append(f"  met by others: {', '.join(REPORTS + report for report in self.reports)}")
        lines.append(f"  check: {self.check}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one check on one parkable; *reason* says why when it is not simply kept."""

    promise: int
    check: str
    title: str
    outcome: Outcome
    reason: str = ""
    finding: Finding | None = None


def bytes_text(count: int) -> str:
    """``65,536 bytes``: exact, because these differences are often of a few bytes."""
    return f"{count:,} byte{'' if abs(count) == 1 else 's'}"


def error_text(error: BaseException) -> str:
    """The exception as a person wants it: its type, its first line, and where the implementation raised it."""
    words = [line for line in str(error).splitlines() if line.strip(" =")]  # the sanitizer draws a line first
    text = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
    traceback = error.__traceback__
    place = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/pytest_park/" not in file and not file.startswith("<"):
            place = f" ({file.rsplit('/', 1)[-1]}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return text + place


def shortened(words: tuple[str, ...], separator: str, most: int = 8) -> str:
    """The words in a row; of more than *most* the first ones and the last."""
    if len(words) <= most:
        return separator.join(words)
    return separator.join((*words[: most - 1], f"... ({len(words) - most} more)", words[-1]))
