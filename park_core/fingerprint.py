"""Fingerprints of device bytes: is a host copy still current, without bringing the bytes over to compare?

Nothing else tells: a write through ``.data`` moves no version counter. Each 8-byte word is mixed with a key for its
place by a bijection, and the mixed words are summed modulo 2**64. So a change of one word is always noticed, and any
other change that does not know the keys goes unnoticed once in about 2**64 times. A plain sum or ``torch.hash_tensor``
(xor) would miss reordered words, and the xor every weight that is filled with one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from park_core.storage import bytes_of

__all__ = ["fingerprints"]

_WORDS = 1 << 20  # per chunk; three buffers of 8 MiB stay in the cache of a GPU
_KEY, _MIX, _FOLD = -7046029254386353131, -4658895280553007687, -7723592293110705685  # odd, as in splitmix64
_SHIFT = torch.tensor(29)


class _Piece(NamedTuple):
    """Part of a storage, and its place among the words of a chunk."""

    owner: int
    content: Tensor
    end: int


def fingerprints(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """One number per storage, computed on its device; equal bytes in the same sequence of sizes have equal numbers.

    Raises:
        torch.OutOfMemoryError: the device has no room for the buffers (24 MiB at the most).
    """
    sums = [storage.nbytes() for storage in storages]
    if not storages:
        return sums
    size = min(_WORDS, sum(-(-storage.nbytes() // 8) for storage in storages))
    device = storages[0].device
    words, spare = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(2))
    keys = torch.arange(1, size + 1, device=device).mul_(_KEY)
    for chunk in _chunks(storages, size):
        ends = [piece.end for piece in chunk]
        total = _mixed(chunk, words[: ends[-1]], spare[: ends[-1]], keys[: ends[-1]])
        upto = total[[end - 1 for end in ends]].tolist()
        for piece, before, after in zip(chunk, [0, *upto], upto, strict=False):
            sums[piece.owner] = (sums[piece.owner] * _FOLD + after - before) % (1 << 64)
    return sums


def _chunks(storages: Sequence[torch.UntypedStorage], size: int) -> Iterator[list[_Piece]]:
    """The storages cut and packed into chunks of ``size`` words. Each piece starts at a word."""
    chunk: list[_Piece] = []
    at = 0
    for owner, storage in enumerate(storages):
        content = bytes_of(storage)
        while content.numel():
            head, content = content[: (size - at) * 8], content[(size - at) * 8 :]
            at += -(-head.numel() // 8)
            chunk.append(_Piece(owner, head, at))
            if at == size:
                yield chunk
                chunk, at = [], 0
    if chunk:
        yield chunk


def _mixed(chunk: list[_Piece], words: Tensor, spare: Tensor, keys: Tensor) -> Tensor:
    """Running sums of the mixed words of a chunk."""
    parts: list[Tensor] = []
    zeros = torch.zeros(7, dtype=torch.uint8, device=words.device)
    for piece in chunk:
        parts += [piece.content, zeros[: -piece.content.numel() % 8]]
    torch.cat(parts, out=words.view(torch.uint8))
    words.bitwise_xor_(keys)
    for multiplier in (_MIX, _FOLD):
        words.mul_(multiplier)
        torch.bitwise_right_shift(words, _SHIFT, out=spare)
        words.bitwise_xor_(spare)
    return torch.cumsum(words, 0, out=spare)
