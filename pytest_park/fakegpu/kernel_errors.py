"""What kernels raise. They are borrowed from the host, and nobody should see that in their errors."""

from __future__ import annotations

import re
import traceback
from typing import NoReturn

from pytest_park.sizes import format_bytes

from . import active


def as_on_a_gpu(error: BaseException) -> None:
    """Let what a borrowed kernel raised be what a GPU's would be.

    A GPU's kernels have no Python frames, whose locals would keep tensors alive: those of all frames below the caller's
    that *error* has passed are cleared. And where the host had no memory for what the kernel was to make, this raises
    what a device says when it has none.
    """
    assert error.__traceback__ is not None
    traceback.clear_frames(error.__traceback__.tb_next)
    if type(error) is RuntimeError and (wanted := _NO_HOST_MEMORY.search(str(error))):
        _refuse(int(wanted[1]))


class NoHostMemory(RuntimeError):
    """The host has no memory for a tensor of its own: no matter of the device."""


#: What ``c10/core/impl/alloc_cpu.cpp`` says.
_NO_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: [^:]* memory: you tried to allocate (\d+) bytes")


def _refuse(nbytes: int) -> NoReturn:
    card = active.card(active.index())
    block = card.allocate(nbytes)  # torch.OutOfMemoryError where the device has no room either
    card.allocator.free(block)
    raise RuntimeError(
        f"{card.device} has room for {format_bytes(nbytes)}, but the host, whose memory it borrows, has not: give the"
        " fake device less memory, so that it runs out first, or use activate(data=False)"
    ) from None
