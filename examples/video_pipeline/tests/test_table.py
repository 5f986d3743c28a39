"""How sizes are written."""

from __future__ import annotations

import pytest

from examples.video_pipeline.runs import MiB
from examples.video_pipeline.table import mib


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1, "1 B"),
        (40960, "40.0 KiB"),
        (MiB // 2, "0.5 MiB"),
        (224 * MiB, "224.0 MiB"),
        (24 * 1024 * MiB, "24.0 GiB"),
    ],
)
def test_sizes_are_in_mib_unless_that_would_not_tell(size: int, text: str) -> None:
    assert mib(size) == text
