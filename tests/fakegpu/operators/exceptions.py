"""What of torch's databases the fake device cannot do, with the reason. Each is expected to fail, strictly: one that
starts to pass must leave this list. ``pytest -ra`` prints them in its summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Exception_:
    """*raises* is what the test fails with."""

    reason: str
    raises: type[BaseException]

    def mark(self) -> Any:
        return pytest.mark.xfail(reason=self.reason, raises=self.raises, strict=True)


EXCEPTIONS: dict[tuple[str, str], Exception_] = {}
