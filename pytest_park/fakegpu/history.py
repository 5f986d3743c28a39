"""What the allocator did, step by step: the ``device_traces`` of a memory snapshot, while somebody asked for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from . import stacks

if TYPE_CHECKING:
    from .blocks import Block

Action = Literal[
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
    "snapshot",
]  # fmt: skip
#: For which events stacks are kept (``RecordContext``); each has those before it.
Context = Literal["state", "alloc", "all"]

_LEVELS: Final[tuple[str, ...]] = get_args(Context)


class History:
    """The last *max_entries* steps of one allocator, and where its live blocks come from.

    *context* says for what stacks are kept: nothing, live blocks (``"state"``), the trace as well (``"alloc"``), or
    also the calls that free (``"all"``). *skip* are actions that are not noted.
    """

    def __init__(
        self, max_entries: int | None = None, context: Context | None = "all", skip: Collection[Action] = ()
    ) -> None:
        self._entries: deque[tuple[Action, int, int, int, int, Any]] = deque(maxlen=max_entries)
        self._level = 0 if context is None else 1 + _LEVELS.index(context)
        self._skip = frozenset(skip)
        self._allocated_at: dict[int, Any] = {}
        self._freed_at: dict[int, Any] = {}

    def note(self, action: Action, address: int, size: int, stream: int = 0, stack: Any = None) -> None:
        """One step more; *address* is what the driver has free for ``"oom"``."""
        if action not in self._skip:
            self._entries.append((action, address, size, stream, time.time_ns(), stack if self._level > 1 else None))

    def allocated(self, block: Block) -> None:
        stack = self._allocated_at[block.address] = stacks.capture() if self._level else None
        self.note("alloc", block.address, block.requested, block.stream, stack)

    def free_called(self, block: Block) -> None:
        """May be called in the middle of anything."""
        if self._level > 2:
            self._freed_at[block.address] = stacks.capture()

    def freed(self, block: Block, action: Literal["free_requested", "free_completed"]) -> None:
        stack = self._freed_at.get(block.address) or self._allocated_at.get(block.address)
        self.note(action, block.address, block.requested, block.stream, stack)
        if action == "free_completed":
            self._allocated_at.pop(block.address, None)
            self._freed_at.pop(block.address, None)

    def go_on_from(self, before: History) -> None:
        """Have all that *before* has, as far as there is room."""
        self._entries.extend(before._entries)
        self._allocated_at |= before._allocated_at

    def called(self) -> Any:
        """The stack of a call that is neither an allocation nor a free of a block."""
        return stacks.capture() if self._level > 1 else None

    def frames_of(self, block: Block) -> list[dict[str, Any]]:
        """Where a live *block* was allocated."""
        return stacks.frames(self._allocated_at.get(block.address))

    def trace(self) -> list[dict[str, Any]]:
        """The steps in the format of ``torch.cuda.memory._snapshot()["device_traces"]``, times in microseconds."""
        return [
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "time_us": nanoseconds // 1000,
                "pool_id": (0, 0),
                "frames": stacks.frames(stack),
            }
            for action, address, size, stream, nanoseconds, stack in self._entries
        ]
