"""Faults on demand: the k-th event from now fails, once."""

from __future__ import annotations


class Fuse:
    """Blows at the k-th call of `check` after `arm`; then it is whole again.

    *kind* names the event in messages; *default* makes the error that it raises when none is given.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._left = 0
        self._error: BaseException | None = None

    def arm(self, after: int, error: BaseException) -> None:
        """Fail the *after*-th event from now (1 is the next one) with *error*.

        Raises ``ValueError`` for what is no such number, ``TypeError`` for what cannot be raised.
        """
        if isinstance(after, bool) or not isinstance(after, int) or after < 1:
            raise ValueError(f"the {self.kind} to fail is counted from 1, the next one; got after={after!r}")
        if not isinstance(error, BaseException):
            raise TypeError(f"the {self.kind} can fail with an exception, made before; got error={error!r}")
        self._left, self._error = after, error

    def disarm(self) -> None:
        self._left, self._error = 0, None

    @property
    def armed(self) -> bool:
        return self._left > 0

    def check(self) -> None:
        """Count one event; raise if it is the one."""
        if not self._left:
            return
        self._left -= 1
        if not self._left:
            error, self._error = self._error, None
            assert error is not None
            raise error
