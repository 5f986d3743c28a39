"""Watching what kernels are given: `Watch` stops an operation before it sees the placeholder of a parked weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .subclass import wraps_others


class SawPlaceholder(BaseException):
    """A kernel was about to be called with a placeholder. Not an Exception: the code under test must not catch it."""

    def __init__(self, operator: str, names: str) -> None:
        super().__init__(f"{operator} was given the placeholder of {names}")


class Watch(TorchDispatchMode):
    """Raises `SawPlaceholder` instead of running a kernel on any of these parked weights."""

    def __init__(self, parked: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}
        for name, weight in parked.items():
            try:
                key = weight.untyped_storage()._cdata
            except Exception:
                continue  # it answers nothing while parked, so nobody can hand it to a kernel unnoticed
            self._names[key] = f"{self._names[key]}, {name}" if key in self._names else name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            if not wraps_others(tensor):
                names = self._names.get(tensor.untyped_storage()._cdata)
                if names is not None:
                    raise SawPlaceholder(str(function), names)
        return function(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
