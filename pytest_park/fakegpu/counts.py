"""What an allocator counts, and how ``torch.cuda.memory_stats`` presents it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocator import CachingAllocator


class Counts:
    """What ``torch.cuda.memory_stats`` counts: what is there, how much it ever was at once, and all that came. What was
    freed is what came and is not there."""

    __slots__ = (
        "already_there",
        "blocks",
        "blocks_came",
        "blocks_peak",
        "requested",
        "requested_came",
        "requested_peak",
        "reserved",
        "reserved_came",
        "reserved_peak",
        "segments",
        "segments_came",
        "segments_peak",
        "size",
        "size_came",
        "size_peak",
        "unused",
        "unused_came",
        "unused_peak",
        "unused_size",
        "unused_size_came",
        "unused_size_peak",
    )  # fmt: skip

    #: torch's name of each row
    ROWS = (
        ("allocation", "blocks"), ("allocated_bytes", "size"), ("requested_bytes", "requested"),
        ("segment", "segments"), ("reserved_bytes", "reserved"),
        ("inactive_split", "unused"), ("inactive_split_bytes", "unused_size"),
    )  # fmt: skip

    def __init__(self) -> None:
        for name in Counts.__slots__:
            setattr(self, name, 0)
        self.already_there = {}

    #: What there was when the accumulated counts were last reset, by row.
    already_there: dict[str, int]
    blocks: int
    blocks_peak: int
    blocks_came: int
    size: int
    size_peak: int
    size_came: int
    requested: int
    requested_peak: int
    requested_came: int
    segments: int
    segments_peak: int
    segments_came: int
    reserved: int
    reserved_peak: int
    reserved_came: int
    unused: int
    unused_came: int
    unused_peak: int
    unused_size: int
    unused_size_came: int
    unused_size_peak: int

    def reserve(self, size: int, segments: int = 1) -> None:
        self.segments += segments
        self.segments_came += segments
        self.segments_peak = max(self.segments_peak, self.segments)
        self.reserved += size
        self.reserved_came += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def unreserve(self, size: int, segments: int = 1) -> None:
        self.segments -= segments
        self.reserved -= size

    def reset_peaks(self) -> None:
        for _, name in self.ROWS:
            setattr(self, f"{name}_peak", getattr(self, name))

    def reset_accumulated(self) -> None:
        for _, name in self.ROWS:
            setattr(self, f"{name}_came", 0)
            self.already_there[name] = getattr(self, name)

    def rows(self) -> dict[str, dict[str, int]]:
        """By torch's names: ``{"allocated_bytes": {"current": …, "peak": …, "allocated": …, "freed": …}, …}``."""
        found = {}
        for row, name in self.ROWS:
            current, peak, came = (getattr(self, f"{name}{kind}") for kind in ("", "_peak", "_came"))
            freed = came + self.already_there.get(name, 0) - current
            found[row] = {"current": current, "peak": peak, "allocated": came, "freed": freed}
        return found


def statistics(allocator: CachingAllocator) -> dict[str, Any]:
    """The keys of ``torch.cuda.memory_stats``."""
    found: dict[str, Any] = {}
    waits = allocator.waiting()
    pools = (("all", allocator.all, None), ("large_pool", allocator.large, allocator.large))
    for name, counts, pool in (*pools, ("small_pool", allocator.small, allocator.small)):
        rows = counts.rows()
        waiting = [block for block in waits if pool is None or block.segment.pool is pool]
        for active, row, amount in (
            ("active", "allocation", len(waiting)),
            ("active_bytes", "allocated_bytes", sum(block.size for block in waiting)),
            ("requested_bytes", "requested_bytes", sum(block.requested for block in waiting)),
        ):  # active is also what was freed and waits for a stream; its peak counts what waits now
            rows[active] = dict(rows[row])
            rows[active]["current"] += amount
            rows[active]["freed"] -= amount
            rows[active]["peak"] = max(rows[active]["peak"], rows[active]["current"])
        for row, measures in rows.items():
            found |= {f"{row}.{name}.{measure}": value for measure, value in measures.items()}
    # the model never limits what may be split, so nothing is oversize
    for row in ("oversize_allocations", "oversize_segments"):
        found |= {f"{row}.{measure}": 0 for measure in ("current", "peak", "allocated", "freed")}
    found["max_split_size"] = -1
    found["num_sync_all_streams"] = allocator.times_waited
    found["num_alloc_retries"] = allocator.retries
    found["num_ooms"] = allocator.out_of_memory_count
    found["num_device_alloc"] = allocator.times_taken
    found["num_device_free"] = allocator.times_given
    return dict(sorted(found.items()))
