"""``tensor.to("fakegpu")`` with several devices: torch asks the guard of a device which one is current, and a guard
from Python cannot say. All else that names a device without an index asks `active` and needs no patch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import active

_native: Any = torch.Tensor.to


def patches() -> Iterator[tuple[Any, str, Any]]:
    if len(active.cards) > 1:
        yield torch.Tensor, "to", to


def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    moved: torch.Tensor = _native(
        self, *(_with_index(value) for value in args), **{name: _with_index(value) for name, value in kwargs.items()}
    )
    return moved


def _with_index(value: Any) -> Any:
    names_it = (isinstance(value, str) and value == "fakegpu") or (
        isinstance(value, torch.device) and value.type == "fakegpu" and value.index is None
    )
    return torch.device("fakegpu", active.index()) if names_it else value
