"""Checkpoint files that are mapped into memory: which one is behind an address, and is it still the same?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MappedFile"]


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that was mapped, as it was then.

    Attributes:
        path: of the file.
        state: inode, size, time of the last change in nanoseconds.
    """

    path: str
    state: tuple[int, int, int]

    @classmethod
    def behind(cls, address: int) -> MappedFile | None:
        """The file that is mapped at ``address``; None for ordinary memory, and where there is no ``/proc``."""
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return None
        for line in lines:  # "start-end permissions offset device inode path"
            span, *_, inode, path = [*line.split(maxsplit=5), ""][:6]
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                return (
                    cls(path, _state(path)) if path.startswith("/") and inode != "0" and os.path.exists(path) else None
                )
        return None

    def change(self) -> str:
        """What happened to the file; empty if nothing did."""
        try:
            return "" if _state(self.path) == self.state else "changed"
        except OSError:
            return "vanished"


def _state(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
