"""Copies to pinned host memory that the host has not waited for yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    stream: int
    seq: int
    arriving: torch.Tensor
    target: torch.Tensor


class PendingCopies:
    """They are carried out when the host has waited for the stream that they were given to, directly or through an
    event or another stream; as on a GPU, memory that nobody waited for holds something else."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, stream: int, seq: int, arriving: torch.Tensor, target: torch.Tensor) -> None:
        self._copies.append(_Copy(stream, seq, arriving, target))

    def deliver(self, is_due: Callable[[int, int], bool]) -> None:
        """Carry out the copies that are due, given the stream and the number of each."""
        if self._copies:
            due = [copy for copy in self._copies if is_due(copy.stream, copy.seq)]
            self._copies = [copy for copy in self._copies if copy not in due]
            for copy in due:
                copy.target.copy_(copy.arriving)

    def deliver_to(self, memory: torch.Tensor) -> None:
        """Carry out the copies into *memory*, which the device itself is about to read in turn."""
        key = memory.untyped_storage()._cdata
        due = [copy for copy in self._copies if copy.target.untyped_storage()._cdata == key]
        self._copies = [copy for copy in self._copies if copy not in due]
        for copy in due:
            copy.target.copy_(copy.arriving)
