"""Sizes in bytes, as people write them: ``12 GiB`` is 12 * 1024**3.

Only binary units are known. ``12 GB`` is refused rather than guessed: cards are sold in GB and measured in GiB, and the
7 % between the two are of the size of the faults that this project is about.
"""

from __future__ import annotations

import re
from typing import Final

KiB: Final = 1024
MiB: Final = 1024**2
GiB: Final = 1024**3
TiB: Final = 1024**4

_UNITS: Final = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
_BY_LOWER_CASE: Final = {unit.lower(): size for unit, size in _UNITS.items()} | {"": 1}
_SIZE: Final = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*")
_WHAT_IS_VALID: Final = "a size is a whole number of bytes, or a number with B, KiB, MiB, GiB or TiB, such as '12 GiB'"


def parse_size(size: int | str) -> int:
    """Bytes of ``size``: an int is bytes, a text is a number and a binary unit (``"1.4 GiB"``, to the nearest byte).

    Raises ``ValueError``, which says what is valid, for anything else and for negative sizes.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ValueError(f"{size!r} is not a size: {_WHAT_IS_VALID}.")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"{size} is not a size, because it is negative: {_WHAT_IS_VALID}.")
        return size
    match = _SIZE.fullmatch(size)
    factor = _BY_LOWER_CASE.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{size!r} is not a size: {_WHAT_IS_VALID}.{_hint(match['unit'] if match else '')}")
    from fractions import Fraction  # here, because most runs of pytest name no size and need not load it

    return round(Fraction(match["number"]) * factor)


def format_bytes(size: float) -> str:
    """``size`` bytes as a person reads them: ``"0 B"``, ``"512 B"``, ``"2.00 MiB"``, ``"-1.40 GiB"``."""
    for unit, factor in _UNITS.items():
        amount = size / factor
        if abs(round(amount, 2)) < 1024 or unit == "TiB":
            break
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.2f} {unit}"


def _hint(unit: str) -> str:
    """What a person probably meant by a decimal unit such as GB."""
    meant = {"k": "KiB", "kb": "KiB", "m": "MiB", "mb": "MiB", "g": "GiB", "gb": "GiB", "t": "TiB", "tb": "TiB"}
    return f" {unit} is not one of them: did you mean {meant[unit.lower()]}?" if unit.lower() in meant else ""
