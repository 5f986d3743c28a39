"""How much room there is: headroom of a device, and of the host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

__all__ = ["Headroom", "HostHeadroom", "device_headroom", "host_headroom"]


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that this process can still allocate on one device.

    Attributes:
        bytes: min(driver free, cap - reserved) + reserved but unused - fragmented; 0 at least.
        driver_free: what the driver reports as free, or a stand-in for it (see ``note``).
        reserved_unused: what the caching allocator has reserved but not handed out.
        fragmented: the part of it that lies in pieces too small for the request that was asked about.
        cap: the limit of this process (``set_per_process_memory_fraction``) in bytes; None without one.
        note: why the driver's reading was not trusted, or what to do if it is wrong; empty in the normal case.
        unified: the device has no memory of its own, so moving weights to the host frees nothing.
    """

    bytes: int
    driver_free: int
    reserved_unused: int
    fragmented: int = 0
    cap: int | None = None
    note: str = ""
    unified: bool = False


@dataclass(frozen=True, slots=True)
class HostHeadroom:
    """Bytes that this process can still allocate on the host.

    Attributes:
        bytes: the smaller of the two below.
        available: what the kernel can hand out without swapping (``psutil``'s ``available``).
        cgroup: what the tightest memory limit of the process's control groups leaves; None without a limit.
    """

    bytes: int
    available: int
    cgroup: int | None = None


def device_headroom(device: torch.device | str, *, request: int = 0) -> Headroom:
    """Measure the headroom of ``device``, not of the current device.

    Args:
        device: the device.
        request: bytes that are to be allocated in one piece. What the allocator has reserved in smaller pieces is no
            room for them.

    Raises:
        ValueError: it is the host.
    """
    device = torch.device(device)
    if device.type == "cpu":
        raise ValueError("the host is no device with headroom; host_headroom() measures it")
    backend: Any = torch.get_device_module(device.type)
    return _metal(backend) if device.type == "mps" else _caching_allocator(backend, device, request)


def _caching_allocator(backend: Any, device: torch.device, request: int) -> Headroom:
    """CUDA, ROCm (which is ``torch.cuda``), XPU, NPU and the fake device: ``torch.cuda``'s functions by the same names.

    The cap is invisible to the driver, and torch holds it against *reserved* bytes
    (``CUDACachingAllocator::setMemoryFraction``), hence ``min(free, cap - reserved)``.
    """
    if device.index is None:  # the type stubs say that it never is
        device = torch.device(device.type, backend.current_device())  # type: ignore[unreachable]
    reserved, allocated = backend.memory_reserved(device), backend.memory_allocated(device)
    properties = backend.get_device_properties(device)
    driver_free, total, note = _driver_free(backend, device, reserved, properties.total_memory)
    fraction = _cap_fraction(backend, device)
    cap = None if fraction is None or fraction >= 1 else int(fraction * total)
    room = driver_free if cap is None else min(driver_free, cap - reserved)
    fragmented = _fragmented(backend, device, request)
    return Headroom(
        bytes=max(0, room + reserved - allocated - fragmented),
        driver_free=driver_free,
        reserved_unused=reserved - allocated,
        fragmented=fragmented,
        cap=cap,
        note=note,
        unified=any(getattr(properties, name, False) for name in ("is_integrated", "is_integrated_gpu")),  # XPU's name
    )


def _metal(backend: Any) -> Headroom:
    """MPS, which shares its memory with the host: parking would free nothing there.

    ``recommended_max_memory()`` is Metal's ``recommendedMaxWorkingSetSize``, and ``driver_allocated_memory()`` counts
    what the allocator caches, too (documentation of ``torch.mps``). Neither takes a device: there is only one.
    """
    reserved, allocated = backend.driver_allocated_memory(), backend.current_allocated_memory()
    free = max(0, backend.recommended_max_memory() - reserved)
    return Headroom(free + reserved - allocated, free, reserved - allocated, unified=True)


def _fragmented(backend: Any, device: torch.device, request: int) -> int:
    """Bytes in free pieces of large segments that are partly in use, as far as they are too small for ``request``.

    Before it gives up, the allocator returns the segments that are wholly free, but not these
    (``CUDACachingAllocator::release_cached_blocks``; "non-releasable" in ``torch.cuda.memory_summary``). Pages of
    expandable segments go back one by one, and torch does not count them; XPU counts nothing of the kind. Pieces in the
    pool of small blocks stay in the count: they are little, less than 2 MiB per segment, and any stage needs some.
    """
    if not request:
        return 0
    pieces = int(backend.memory_stats(device).get("inactive_split_bytes.large_pool.current", 0))
    if pieces < request:
        return pieces  # each of them is too small; to look at them would take longer
    large_enough: int = sum(
        block["size"]
        for segment in backend.memory_snapshot()
        if segment["device"] == device.index and segment["segment_type"] == "large" and not segment["is_expandable"]
        for block in segment["blocks"]
        if block["state"] == "inactive" and request <= block["size"] < segment["total_size"]
    )
    return max(0, pieces - large_enough)


def _driver_free(backend: Any, device: torch.device, reserved: int, capacity: int) -> tuple[int, int, str]:
    """(free, total, what is odd about them); the stand-in for a free that cannot be right is capacity - reserved.

    Some drivers report no free memory on an idle card, but a full card looks the same: other processes are invisible.
    So nothing free is believed whenever it can be true. Wrongly believed it costs a transfer; wrongly doubted it runs
    the next stage out of memory.
    """
    try:
        free, total = backend.mem_get_info(device)
    except Exception as error:  # a driver may raise anything; parking must not depend on it
        return capacity - reserved, capacity, f"mem_get_info raised {type(error).__name__}: {error}"
    reading = f"the driver reports {free} B free of {total} B"
    if total <= 0 or not 0 <= free <= total:
        return capacity - reserved, capacity, reading
    if free > total - reserved:
        return capacity - reserved, capacity, f"{reading} although this process has reserved {reserved} B"
    return free, total, "" if free else f"{reading}; if that is not so, set parking to always or never"


def _cap_fraction(backend: Any, device: torch.device) -> float | None:
    probe = getattr(backend, "get_per_process_memory_fraction", None)
    return None if probe is None else float(probe(device))


def host_headroom() -> HostHeadroom:
    """Measure what the host can still give: what is available, and what the control groups leave."""
    available = int(psutil.virtual_memory().available)
    cgroup = _cgroup_room()
    return HostHeadroom(available if cgroup is None else min(available, cgroup), available, cgroup)


def _cgroup_room(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the tightest limit on the way up leaves; page cache that can be dropped counts as room."""
    rooms = [_group_room(group) for group in _groups(root, membership)]
    return min((room for room in rooms if room is not None), default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    """The process's memory control group and its ancestors, in version 2 and version 1 layout."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        groups += [folder for folder in (group, *group.parents) if folder == top or top in folder.parents]
    return groups


def _group_room(group: Path) -> int | None:
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, usage = (group / limit_file).read_text().strip(), int((group / usage_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= 1 << 60:  # version 1 writes "no limit" as a huge number
            return None
        return max(0, int(limit) - usage + int(stat.get("inactive_file", 0)))
    return None
