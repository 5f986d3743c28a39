"""Bytes as people write them: ``"12 GiB"``. KiB is not KB."""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_size"]

_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def parse_size(text: int | str) -> int:
    """``"1.5 GiB"`` as bytes; an int is bytes already.

    Raises:
        ValueError: not a size; the message shows one that is.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B)\s*", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f'{text!r} is not a size; write bytes as an int, or text such as "12 GiB" ({", ".join(_UNITS)})'
        )
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(count: int) -> str:
    """``count`` bytes for a person."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(count) >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.2f} {unit}"
    return f"{count} B"
