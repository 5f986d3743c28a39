"""``torch.fakegpu.memory``: the functions of ``torch.cuda.memory``, for the fake devices that are active."""

from __future__ import annotations

import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Collection
from types import FunctionType
from typing import Any

import torch

from . import active, allocator_settings
from .by_device import named_device
from .device import FakeDevice
from .history import Action, Context, History
from .snapshot import snapshot

Device = torch.device | int | str | None


def card_of(device: Device = None) -> FakeDevice:
    """The fake device that *device* names; the current one if it names none."""
    named = named_device(device)
    if named is not None and named.type != "fakegpu":
        raise ValueError(f"Expected a fakegpu device, but got: {named}")
    return active.card(active.index_of(named))


def _cards() -> tuple[FakeDevice, ...]:
    return card_of().devices


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return card_of(device).mem_get_info()


def memory_allocated(device: Device = None) -> int:
    return card_of(device).allocated


def max_memory_allocated(device: Device = None) -> int:
    return card_of(device).peak_allocated


def memory_reserved(device: Device = None) -> int:
    return card_of(device).reserved


def max_memory_reserved(device: Device = None) -> int:
    return card_of(device).allocator.all.reserved_peak


def reset_peak_memory_stats(device: Device = None) -> None:
    card_of(device).reset_peak()


def reset_accumulated_memory_stats(device: Device = None) -> None:
    card_of(device).allocator.reset_accumulated()


def memory_stats(device: Device = None) -> OrderedDict[str, Any]:
    return OrderedDict(card_of(device).allocator.statistics())


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """`memory_stats` before it is flattened, with the words of ``torch.accelerator``."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *path, last = name.replace("allocation.", "allocated.", 1).split(".")
        place = nested
        for step in path:
            place = place.setdefault(step, {})
        place[last] = value
    return nested


#: torch's own table of the statistics, which has no CUDA in it.
memory_summary: Any = FunctionType(
    torch.cuda.memory.memory_summary.__code__,
    vars(torch.cuda.memory)
    | {
        "memory_stats": memory_stats,
        "_get_device_index": lambda device, optional: card_of(device).index,
    },
    argdefs=torch.cuda.memory.memory_summary.__defaults__,
)


def empty_cache() -> None:
    for card in active.cards:
        card.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    card = card_of(device)
    card.set_cap(None if fraction == 1 else int(fraction * card.memory))


def get_per_process_memory_fraction(device: Device = None) -> float:
    card = card_of(device)
    return 1.0 if card.cap is None else card.cap / card.memory


def get_allocator_backend() -> str:
    return "native"


def memory_snapshot(mempool_id: tuple[int, int] | None = None, include_traces: bool = True) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = _snapshot()["segments"]
    return segments


def _set_allocator_settings(env: str) -> None:
    """``"expandable_segments:True"``, for all devices; raises ``NotImplementedError`` for any other setting."""
    on = allocator_settings.expandable_segments(env)
    if on is not None:
        for card in _cards():
            card.allocator.expandable_segments = on


def _record_memory_history(
    enabled: str | bool | None = "all",
    context: Context | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    device: Device = None,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: Collection[Action] | None = None,
) -> None:
    """Record, on all devices, what `_snapshot` then shows as traces and frames; ``None`` stops and forgets. Stacks are
    those of Python. Parameters as in ``torch.cuda.memory._record_memory_history``."""
    state = {True: "all", False: None}.get(enabled, enabled) if isinstance(enabled, bool) else enabled
    if state not in ("state", "all", None):
        raise RuntimeError("expected state to be 'state', 'all', or None")
    if context not in ("state", "alloc", "all", None):
        raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
    if stacks not in ("python", "all"):
        raise RuntimeError("expected stacks to be 'python', or 'all'")
    for card in _cards():
        history = None
        if state is not None:
            history = History(max_entries if state == "all" else 1, context, skip_actions or ())
            if card.allocator.history is not None and not clear_history:
                history.go_on_from(card.allocator.history)
        card.allocator.record(history)


def _snapshot(device: Device = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """The memory of all fake devices, and what was recorded of it, for ``torch.cuda._memory_viz``."""
    if augment_with_fx_traces:
        raise NotImplementedError("fakegpu does not augment snapshots with traces of torch.fx")
    return snapshot([card.allocator for card in _cards()])


def _dump_snapshot(
    filename: str | os.PathLike[str] = "dump_snapshot.pickle", augment_with_fx_traces: bool = False
) -> None:
    """`_snapshot` in a file, as https://pytorch.org/memory_viz reads it."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(augment_with_fx_traces=augment_with_fx_traces), file)
