"""Fingerprints of device bytes: is a host copy still current, without bringing the bytes over to compare?

Nothing else tells: a write through ``.data`` moves no version counter. Each 8-byte word is mixed with a key for its
place by a bijection, and the mixed words are summed modulo 2**64. So a change of one word is always noticed, and any
other change that does not know the keys goes unnoticed once in about 2**64 times. A plain sum or ``torch.hash_tensor``
(xor) would miss reordered words, and the xor every weight that is filled with one value.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from park_core.storage import bytes_of

__all__ = ["fingerprints", "known_fingerprints"]

_WORDS = 1 << 20  # per chunk; three buffers of 8 MiB stay in the cache of a GPU
_KEY, _MIX, _FOLD = -7046029254386353131, -4658895280553007687, -7723592293110705685  # odd, as in splitmix64
_SHIFT = torch.tensor(29)


class _Piece(NamedTuple):
    """A storage, or a full chunk of a larger one."""

    owner: int
    content: Tensor
    words: int


def fingerprints(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """One number per storage, computed on its device; equal bytes have equal numbers, in whatever company.

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
        ends = list(accumulate(piece.words for piece in chunk))
        total = _mixed(chunk, words[: ends[-1]], spare[: ends[-1]], keys)
        upto = total[[end - 1 for end in ends]].tolist()
        for piece, before, after in zip(chunk, [0, *upto], upto, strict=False):
            sums[piece.owner] = (sums[piece.owner] * _FOLD + after - before) % (1 << 64)
    return sums


def known_fingerprints(storages: Sequence[torch.UntypedStorage]) -> list[int | None]:
    """:func:`fingerprints`, or None for each where the device has no room to find out."""
    try:
        return list(fingerprints(storages))
    except torch.OutOfMemoryError as failure:
        traceback.clear_frames(failure.__traceback__)  # or its buffers stay as long as anybody has the error
        return [None] * len(storages)


def _chunks(storages: Sequence[torch.UntypedStorage], size: int) -> Iterator[list[_Piece]]:
    """The storages packed into chunks of at most ``size`` words. Only what is larger than that is cut."""
    chunk: list[_Piece] = []
    room = size
    for owner, storage in enumerate(storages):
        for content in bytes_of(storage).split(size * 8):  # type: ignore[no-untyped-call]
            words = -(-content.numel() // 8)
            if words > room:
                yield chunk
                chunk, room = [], size
            chunk.append(_Piece(owner, content, words))
            room -= words
    yield chunk


def _mixed(chunk: list[_Piece], words: Tensor, spare: Tensor, keys: Tensor) -> Tensor:
    """Running sums of the mixed words of a chunk. The last word of a piece is filled up with zeros."""
    zeros = torch.zeros(7, dtype=torch.uint8, device=words.device)
    parts = [part for piece in chunk for part in (piece.content, zeros[: -piece.content.numel() % 8])]
    torch.cat(parts, out=words.view(torch.uint8))
    torch.cat([keys[: piece.words] for piece in chunk], out=spare)
    words.bitwise_xor_(spare)
    for multiplier in (_MIX, _FOLD):
        words.mul_(multiplier)
        torch.bitwise_right_shift(words, _SHIFT, out=spare)
        words.bitwise_xor_(spare)
    return torch.cumsum(words, 0, out=spare)
