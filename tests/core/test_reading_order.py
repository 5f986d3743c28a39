"""The package says in which order to read it."""

from __future__ import annotations

from pathlib import Path

import park_core


def test_every_file_is_named_in_the_reading_order() -> None:
    files = {path.stem for path in Path(park_core.__file__).parent.glob("*.py")} - {"__init__"}
    assert {name for name in files if f"``{name}``" not in str(park_core.__doc__)} == set()
