"""C40: pinned host memory only when asked for, and asynchronous copies only from pinned memory."""

from __future__ import annotations

from ..case import Case
from ..host import HostLedger
from ..registry import promise
from ..verdict import Broken, bytes_text


@promise(
    40,
    "host copies are pinned if that was asked for, and only then",
    cause="pin_memory=True as a default: the kernel can never take the pages back, and sizes are rounded up",
    reports=("pytorch/pytorch/issues/95823", "sgl-project/sglang/pull/39021"),
)
def check_host_copies_are_pinned_only_when_asked(case: Case) -> None:
    host = HostLedger()
    before = host.pinned(), host.bytes()
    case.park()
    pinned, copies = host.pinned() - before[0], host.bytes() - before[1]
    if case.parkable.pinned and pinned < copies:
        raise Broken(expected=f"{bytes_text(copies)} of pinned host copies", seen=bytes_text(pinned))
    if not case.parkable.pinned and pinned >= max(case.bytes, 1):
        raise Broken(
            expected="pageable host copies, as nothing else was asked for", seen=f"{bytes_text(pinned)} pinned"
        )
    case.restore()


@promise(
    40,
    "no copy from or to pageable memory is asynchronous",
    cause="non_blocking=True on a pageable tensor: its bytes are read or written after the call has returned",
    reports=("huggingface/diffusers/issues/11981", "sgl-project/sglang/issues/37963"),
)
def check_no_pageable_copy_is_asynchronous(case: Case) -> None:
    case.device.fake.clear_transfers()
    case.cycle()
    wrong = [
        copy for copy in case.device.fake.transfers if copy.kind != "d2d" and not copy.blocking and not copy.pinned
    ]
    if wrong:
        raise Broken(
            expected="copies between pageable memory and the device block",
            seen=f"{len(wrong)} asynchronous ones, of {bytes_text(sum(copy.bytes for copy in wrong))}",
        )
