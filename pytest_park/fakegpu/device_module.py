"""``torch.fakegpu``: the functions of ``torch.cuda``, for the fake devices that are active."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import active, autocast
from . import amp as amp
from . import memory as memory
from .memory import Device, card_of
from .memory import empty_cache as empty_cache
from .memory import get_allocator_backend as get_allocator_backend
from .memory import get_per_process_memory_fraction as get_per_process_memory_fraction
from .memory import max_memory_allocated as max_memory_allocated
from .memory import max_memory_reserved as max_memory_reserved
from .memory import mem_get_info as mem_get_info
from .memory import memory_allocated as memory_allocated
from .memory import memory_reserved as memory_reserved
from .memory import memory_snapshot as memory_snapshot
from .memory import memory_stats as memory_stats
from .memory import memory_stats_as_nested_dict as memory_stats_as_nested_dict
from .memory import memory_summary as memory_summary
from .memory import reset_accumulated_memory_stats as reset_accumulated_memory_stats
from .memory import reset_peak_memory_stats as reset_peak_memory_stats
from .memory import set_per_process_memory_fraction as set_per_process_memory_fraction
from .streams import Event as Event
from .streams import Stream as Stream
from .streams import current_stream as current_stream
from .streams import default_stream as default_stream
from .streams import set_stream as set_stream


def is_available() -> bool:
    return active.is_available()


def is_initialized() -> bool:
    return active.is_available()


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return len(active.cards)


def current_device() -> int:
    return active.index()


def set_device(device: Device) -> None:
    active.make_current(card_of(device).index)


class device:
    """Context manager that makes *device* the current one, as ``torch.cuda.device`` does."""

    def __init__(self, device: Device) -> None:
        self.index = card_of(device).index
        self.previous = -1

    def __enter__(self) -> None:
        self.previous = active.index()
        active.make_current(self.index)

    def __exit__(self, *exception: object) -> None:
        active.make_current(self.previous)


@dataclass(frozen=True)
class DeviceProperties:
    """What ``get_device_properties`` gives, as far as callers of ``torch.cuda``'s ask."""

    name: str
    total_memory: int
    is_integrated: bool
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def get_device_properties(device: Device = None) -> DeviceProperties:
    card = card_of(device)
    return DeviceProperties("fakegpu", card.memory, card.driver == "unified")


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


def get_arch_list() -> list[str]:
    return []


def get_device_capability(device: Device = None) -> tuple[int, int]:
    return 0, 0


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return autocast.supported_dtypes()


def supported_dtypes() -> set[torch.dtype]:
    """Those of the CPU, whose kernels do the work."""
    return {value for value in vars(torch).values() if isinstance(value, torch.dtype) and "bits" not in str(value)}


def synchronize(device: Device = None) -> None:
    card_of(device).synchronized()


class stream:
    """Context manager that makes *stream* the current one; ``None`` changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exception)


def manual_seed(seed: int) -> None:
    if active.cards:
        card_of().generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for card in active.cards:
        card.generator.manual_seed(int(seed))


def seed() -> None:
    card_of().generator.seed()


def initial_seed() -> int:
    return card_of().generator.initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    return card_of(device).generator.get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    card_of(device).generator.set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [card.generator.get_state() for card in active.cards]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    for card, state in zip(active.cards, states, strict=True):
        card.generator.set_state(state)


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(card.generator for card in active.cards)
    raise AttributeError(f"module 'torch.fakegpu' has no attribute {name!r}")
