"""``torch.fakegpu``: the functions of ``torch.cuda``, for the fake devices that are active."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import active, autocast
from .by_device import named_device
from .device import FakeDevice
from .snapshot import snapshot
from .streams import Event as Event
from .streams import Stream as Stream
from .streams import current_stream as current_stream
from .streams import default_stream as default_stream
from .streams import set_stream as set_stream

Device = torch.device | int | str | None


def _card(device: Device = None) -> FakeDevice:
    named = named_device(device)
    if named is not None and named.type != "fakegpu":
        raise ValueError(f"Expected a fakegpu device, but got: {named}")
    return active.card(active.index_of(named))


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
    active.make_current(_card(device).index)


class device:
    """Context manager that makes *device* the current one, as ``torch.cuda.device`` does."""

    def __init__(self, device: Device) -> None:
        self.index = _card(device).index
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
    card = _card(device)
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
    _card(device).synchronized()


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


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return _card(device).mem_get_info()


def memory_allocated(device: Device = None) -> int:
    return _card(device).allocated


def max_memory_allocated(device: Device = None) -> int:
    return _card(device).peak_allocated


def memory_reserved(device: Device = None) -> int:
    return _card(device).reserved


def max_memory_reserved(device: Device = None) -> int:
    return _card(device).allocator.all.reserved_peak


def reset_peak_memory_stats(device: Device = None) -> None:
    _card(device).reset_peak()


def reset_accumulated_memory_stats(device: Device = None) -> None:
    _card(device).allocator.reset_accumulated()


def memory_stats(device: Device = None) -> OrderedDict[str, Any]:
    return OrderedDict(_card(device).allocator.statistics())


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


def memory_snapshot(mempool_id: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = snapshot([card.allocator for card in active.cards])["segments"]
    return segments


def empty_cache() -> None:
    for card in active.cards:
        card.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    card = _card(device)
    card.set_cap(None if fraction == 1 else int(fraction * card.memory))


def get_per_process_memory_fraction(device: Device = None) -> float:
    card = _card(device)
    return 1.0 if card.cap is None else card.cap / card.memory


def manual_seed(seed: int) -> None:
    if active.cards:
        _card().generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for card in active.cards:
        card.generator.manual_seed(int(seed))


def seed() -> None:
    _card().generator.seed()


def initial_seed() -> int:
    return _card().generator.initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    return _card(device).generator.get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    _card(device).generator.set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [card.generator.get_state() for card in active.cards]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    for card, state in zip(active.cards, states, strict=True):
        card.generator.set_state(state)


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(card.generator for card in active.cards)
    raise AttributeError(f"module 'torch.fakegpu' has no attribute {name!r}")
