"""Fingerprints of device bytes: is a host copy still current, without bringing the bytes over to compare?

Nothing else tells: a write through ``.data`` moves no version counter. The bytes are cut into 4-byte words, each is
multiplied by an odd 64-bit key for its place, and the products are summed modulo 2**64. A change of words by d1, d2...
goes unnoticed if and only if d1*k1 + d2*k2 + ... is 0. Each d is less than 2**32, so 2**32 does not divide it, and for
random odd keys that happens once in 2**32 changes *at the most*: for changes of nothing but top bits, such as the signs
of a whole weight; once in 2**63 where a lowest bit changes. A change of a single word is always noticed.
A plain sum, or ``torch.hash_tensor`` (xor), would miss reordered words, and the xor every weight filled with one value.

A weight is read once from memory. Keys and products are two buffers of 4 MiB, 24 bytes of traffic for each word:
within the cache of an A100 (40 MiB), H100 (50) or RTX 4090 (72), but not of an RTX 3090 (6), where it all makes seven
passes over the bytes. So much is tested; what follows from it for a GPU is reckoned, not measured: two launches per 2
MiB, about 10 us, are 200 GiB/s, and seven passes at 900 GB/s are 120, beside some 10 for the transfer to pageable
memory that is saved and 25 for one through pinned buffers. On a CPU, where there is no faster memory to work in, it
takes 3 to 4 times a copy.
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
    """A tensor, or a full chunk of the bytes of a larger one."""

    owner: int
    content: Tensor


def fingerprints(memory: Sequence[Tensor]) -> list[Fingerprint]:
    """One fingerprint per contiguous tensor, from its bytes; equal bytes have equal ones, in whatever company.

    Raises:
        torch.OutOfMemoryError: the device has no room for the buffers (10 MiB at the most).
        NotImplementedError: the device has no values, as a fake one without data.
    """
    if not memory:
        return []
    size = min(_WORDS, sum(-(-tensor.nbytes // 4) for tensor in memory))
    products = torch.empty(size, dtype=torch.int64, device=memory[0].device)
    products[0].item()  # a device without values says so here, and not after all the work
    keys = _keys(products)
    owners: list[int] = []
    sums: list[Tensor] = []
    for batch in _batches(memory, size):
        owners += [piece.owner for piece in batch]
        words = _words(batch)
        room = products[: words.numel()].view_as(words)
        sums.append(torch.mul(words, keys[: words.shape[1]], out=room).sum(1))
    found: list[list[int]] = [[] for _ in memory]
    for owner, value in zip(owners, torch.cat(sums).tolist(), strict=True):
        found[owner].append(value)
    return [tuple(values) for values in found]


def known_fingerprints(memory: Sequence[Tensor]) -> list[Fingerprint | None]:
    """:func:`fingerprints`, or None for each where the device has no room to find out, or no values."""
    try:
        return list(fingerprints(memory))
    except (torch.OutOfMemoryError, NotImplementedError) as failure:
        traceback.clear_frames(failure.__traceback__)  # or its buffers stay as long as anybody has the error
        return [None] * len(memory)


def _keys(like: Tensor) -> Tensor:
    """An odd random key for each place, the same ones throughout the process. Overwrites ``like``."""
    keys = torch.arange(1, len(like) + 1, device=like.device).mul_(_STEP).add_(_SEED)
    for shift, mix in zip((30, 27), _MIX, strict=True):
        keys.bitwise_xor_(torch.bitwise_right_shift(keys, shift, out=like)).mul_(mix)
    return keys.bitwise_or_(1)


def _batches(memory: Sequence[Tensor], size: int) -> Iterator[list[_Piece]]:
    """The tensors, those above ``size`` words in pieces, as batches of like pieces."""
    like: defaultdict[tuple[torch.dtype, torch.Size], list[_Piece]] = defaultdict(list)
    for owner, tensor in enumerate(memory):
        cut = tensor.nbytes > size * 4 or tensor.nbytes % 4
        contents = bytes_of(tensor.untyped_storage()).split(size * 4) if cut else (tensor,)
        for content in contents:
            like[content.dtype, content.shape].append(_Piece(owner, content))
    # The full chunks of a tensor before what is left of it, whatever else there is.
    for (dtype, shape), pieces in sorted(like.items(), key=lambda item: -item[0][1].numel()):
        step = size * 4 // (-(-shape.numel() * dtype.itemsize // 4) * 4)
        yield from (pieces[start : start + step] for start in range(0, len(pieces), step))


def _words(batch: list[_Piece]) -> Tensor:
    """The words of the pieces, a row for each; filled up with zeros to a whole word."""
    rows = torch.stack([piece.content for piece in batch]) if len(batch) > 1 else batch[0].content
    rows = rows.view(len(batch), -1)
    if short := -rows[0].nbytes % 4:
        rows = torch.nn.functional.pad(rows, (0, short))
    return rows.view(torch.int32)
