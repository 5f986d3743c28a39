"""Who keeps device memory alive: the tensors over each live storage, by the names under which they can be found."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch

from pytest_park.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Holder:
    """A live storage of *bytes* bytes as they were asked for, and the *names* of those who hold tensors over it."""

    bytes: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.names) or "nobody that Python can name (autograd, or an extension)"
        return f"{format_bytes(self.bytes)} held by {names}"


def holders(storages: Iterable[tuple[int, torch.UntypedStorage]]) -> list[Holder]:
    """For each of *storages*, with its bytes, who holds it. Walks all objects of Python: for reports, not for loops."""
    wanted = {storage._cdata: nbytes for nbytes, storage in storages}
    tensors: dict[int, list[torch.Tensor]] = {key: [] for key in wanted}
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor) or item.device.type != "fakegpu":
            continue
        if type(item).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # a wrapper has no storage of its own
            key = item.untyped_storage()._cdata
            if key in tensors:
                tensors[key].append(item)
    del item
    found = []
    for key, nbytes in wanted.items():
        names: dict[str, None] = {}
        for tensor in tensors[key]:
            names |= dict.fromkeys([*_locals(tensor), *_referrers(tensor, besides=tensors[key])])
        found.append(Holder(nbytes, tuple(names)))
    return found


# Loops and no comprehensions below: those would hold the tensor too.


def _locals(tensor: torch.Tensor) -> list[str]:
    """Names in the functions that are running, in all threads; a running function is no referrer for ``gc``."""
    found = []
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_globals.get("__name__") != __name__ and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                names = frame.f_locals
                for name, value in names.items():
                    if value is tensor:
                        found.append(f"{name!r} of {frame.f_code.co_qualname}()")
                if type(names) is dict:  # before Python 3.13 a copy that the frame keeps, and with it all values
                    names.clear()
            frame = frame.f_back
    del top  # perhaps this very function, which would then hold itself and the tensor
    return found


def _referrers(tensor: torch.Tensor, besides: list[torch.Tensor]) -> list[str]:
    found = []
    what = f"{type(tensor).__name__}{tuple(tensor.shape)}"
    for referrer in gc.get_referrers(tensor):
        if isinstance(referrer, dict):
            for key, value in referrer.items():
                if value is tensor:
                    found.append(f"{_owner(referrer)}[{key!r}] ({what})")
        elif referrer is not besides and not isinstance(referrer, FrameType):
            found.append(f"a {type(referrer).__name__} ({what})")
    return found


def _owner(names: dict[Any, Any]) -> str:
    """Of which object or module *names* is the ``__dict__``, or its parameters or buffers."""
    for referrer in gc.get_referrers(names):
        if isinstance(referrer, ModuleType):
            return f"module {referrer.__name__}"
        if isinstance(referrer, torch.nn.Module):
            return f"{type(referrer).__name__}"
        if isinstance(referrer, dict):
            kind = next((key for key in ("_parameters", "_buffers") if referrer.get(key) is names), None)
            if kind:
                return f"{_owner(referrer)}.{kind}"
        elif getattr(referrer, "__dict__", None) is names:
            return f"{type(referrer).__name__}"
    return "a dict"
