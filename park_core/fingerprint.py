"""Fingerprints of device bytes: is a host copy still current, without bringing the bytes over to compare?

Nothing else tells: a write through ``.data`` moves no version counter. The bytes are cut into 4-byte words, each is
multiplied by an odd 64-bit key for its place, and the products are summed modulo 2**64. A change of words by d1, d2...
goes unnoticed if and only if d1*k1 + d2*k2 + ... is 0. Each d is less than 2**32, so 2**32 does not divide it, and for
random odd keys that happens once in 2**32 changes *at the most*: for changes of nothing but top bits, such as the signs
of a whole weight; once in 2**63 where a lowest bit changes. A change of a single word is always noticed.
A plain sum, or ``torch.hash_tensor`` (xor), would miss reordered words, and the xor every weight filled with one value.
"""

from __future__ import annotations

import secrets
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from park_core.storage import bytes_of

__all__ = ["Fingerprint", "fingerprints", "known_fingerprints"]

Fingerprint = tuple[int, ...]
"""One number per chunk of a storage. Not folded into one: each chunk keeps the odds above."""

_WORDS = 1 << 19  # per chunk of 2 MiB: two buffers of 4 MiB, in the cache of any GPU. Launches weigh more below that
_SEED = secrets.randbits(63)
_STEP, _MIX = -7046029254386353131, (-4658895280553007687, -7723592293110705685)  # of the generator splitmix64


class _Piece(NamedTuple):
    """A storage, or a full chunk of a larger one."""

    owner: int
    content: Tensor


def fingerprints(storages: Sequence[torch.UntypedStorage]) -> list[Fingerprint]:
    """One fingerprint per storage, computed on its device; equal bytes have equal ones, in whatever company.

    Raises:
        torch.OutOfMemoryError: the device has no room for the buffers (10 MiB at the most).
        NotImplementedError: the device has no values, as a fake one without data.
    """
    if not storages:
        return []
    size = min(_WORDS, sum(-(-storage.nbytes() // 4) for storage in storages))
    products = torch.empty(size, dtype=torch.int64, device=storages[0].device)
    keys = _keys(products)
    owners: list[int] = []
    sums: list[Tensor] = []
    for words, batch in _batches(storages, size):
        owners += [piece.owner for piece in batch]
        room = products[: words * len(batch)].view(len(batch), words)
        sums.append(torch.mul(_packed(batch).view(len(batch), words), keys[:words], out=room).sum(1))
    found: list[list[int]] = [[] for _ in storages]
    for owner, value in zip(owners, torch.cat(sums).tolist(), strict=True):
        found[owner].append(value)
    return [tuple(values) for values in found]


def known_fingerprints(storages: Sequence[torch.UntypedStorage]) -> list[Fingerprint | None]:
    """:func:`fingerprints`, or None for each where the device has no room to find out, or no values."""
    try:
        return list(fingerprints(storages))
    except (torch.OutOfMemoryError, NotImplementedError) as failure:
        traceback.clear_frames(failure.__traceback__)  # or its buffers stay as long as anybody has the error
        return [None] * len(storages)


def _keys(like: Tensor) -> Tensor:
    """An odd random key for each place, the same ones throughout the process. Overwrites ``like``."""
    keys = torch.arange(1, len(like) + 1, device=like.device).mul_(_STEP).add_(_SEED)
    for shift, mix in zip((30, 27), _MIX, strict=True):
        keys.bitwise_xor_(torch.bitwise_right_shift(keys, shift, out=like)).mul_(mix)
    return keys.bitwise_or_(1)


def _batches(storages: Sequence[torch.UntypedStorage], size: int) -> Iterator[tuple[int, list[_Piece]]]:
    """The storages, those above ``size`` words in pieces, as batches of pieces with the same number of words."""
    by_words: defaultdict[int, list[_Piece]] = defaultdict(list)
    for owner, storage in enumerate(storages):
        for content in bytes_of(storage).split(size * 4):  # type: ignore[no-untyped-call]
            by_words[-(-content.numel() // 4)].append(_Piece(owner, content))
    for words, pieces in by_words.items():
        step = size // words
        yield from ((words, pieces[start : start + step]) for start in range(0, len(pieces), step))


def _packed(batch: list[_Piece]) -> Tensor:
    """The words of the pieces, one piece after the other; each is filled up with zeros to a whole word."""
    contents = [piece.content for piece in batch]
    if any(content.numel() % 4 for content in contents):
        zeros = torch.zeros(3, dtype=torch.uint8, device=contents[0].device)
        contents = [part for content in contents for part in (content, zeros[: -content.numel() % 4])]
    return (contents[0] if len(contents) == 1 else torch.cat(contents)).view(torch.int32)
