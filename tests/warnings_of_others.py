"""What libraries warn of by themselves, in a repository where each warning is an error."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest


def allow(messages: Iterable[str], items: list[pytest.Item], below: Path) -> None:
    """Let the tests *below* a folder, out of *items*, pass over warnings that begin with one of *messages*."""
    for item in items:
        if below in item.path.parents:
            for message in messages:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))
