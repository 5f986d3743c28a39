"""Checkpoint files that are mapped into memory: which one is behind an address, and is it still the same?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MappedFile", "Mappings"]


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that was mapped, as it was then.

    Attributes:
        path: of the file.
        state: inode, size, time of the last change in nanoseconds.
    """

    path: str
    state: tuple[int, int, int]

    def change(self) -> str:
        """What happened to the file; empty if nothing did."""
        try:
            return "" if _state(self.path) == self.state else "changed"
        except OSError:
            return "vanished"


class Mappings:
    """The files that are mapped into this process now. Where there is no ``/proc``, none is known."""

    def __init__(self, table: Path = Path("/proc/self/maps")) -> None:
        self._spans: list[tuple[int, int, str]] = []
        try:
            lines = table.read_text().splitlines()
        except OSError:
            return
        for line in lines:  # "start-end permissions offset device inode path"
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                start, end = fields[0].split("-")
                self._spans.append((int(start, 16), int(end, 16), fields[5]))

    def behind(self, address: int) -> MappedFile | None:
        """The file that is mapped at ``address``; None for ordinary memory."""
        path = next((path for start, end, path in self._spans if start <= address < end), None)
        return MappedFile(path, _state(path)) if path is not None and os.path.exists(path) else None


def _state(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
