"""What the driver of one fake device has, and what it says it has: three separate settings, plus lies on demand."""

from __future__ import annotations

import threading
from typing import Literal, get_args

#: How ``mem_get_info`` answers. ``"unified"`` is a device that shares the host's memory, like an integrated GPU.
Report = Literal["honest", "free-equals-total", "zero", "raises", "unified"]


class Driver:
    """*total* bytes, of which another process holds *other_process* and this process has *taken*.

    *cap* is the process cap (``set_per_process_memory_fraction``). As on CUDA it limits what this process may take and
    is invisible in what the driver reports as free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.cap: int | None = None
        self.taken = 0
        self._other_process = 0
        self._report: Report = "honest"
        self._lock = threading.Lock()

    @property
    def other_process(self) -> int:
        """Bytes that another process holds on this device."""
        return self._other_process

    @other_process.setter
    def other_process(self, nbytes: int) -> None:
        if not 0 <= nbytes <= self.total - self.taken:
            raise ValueError(
                f"another process cannot hold {nbytes} bytes: the device has {self.total} and this process reserved "
                f"{self.taken} of them"
            )
        self._other_process = nbytes

    @property
    def report(self) -> Report:
        """How ``mem_get_info`` answers."""
        return self._report

    @report.setter
    def report(self, report: Report) -> None:
        if report not in get_args(Report):
            raise ValueError(f"unknown driver report {report!r}; valid are {', '.join(get_args(Report))}")
        self._report = report

    @property
    def free(self) -> int:
        """Bytes that are really free."""
        return self.total - self._other_process - self.taken

    def allows(self, nbytes: int) -> bool:
        """Whether the cap lets this process take *nbytes* more."""
        return self.cap is None or self.taken + nbytes <= self.cap

    def take(self, nbytes: int, *, within_cap: bool = True) -> bool:
        """Reserve *nbytes* for this process, if they are there and the cap allows it or is not asked."""
        with self._lock:
            if nbytes > self.free or (within_cap and not self.allows(nbytes)):
                return False
            self.taken += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.taken -= nbytes

    def mem_get_info(self) -> tuple[int, int]:
        """(free, total) as the driver reports them, truthfully or not."""
        if self._report == "raises":
            raise RuntimeError("fakegpu error: the driver cannot report memory (as set by FakeDevice.driver)")
        if self._report == "zero":
            return 0, self.total
        if self._report == "free-equals-total":
            return self.total, self.total
        return self.free, self.total
