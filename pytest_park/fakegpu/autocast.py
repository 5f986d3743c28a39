"""``torch.autocast("fakegpu")``: what runs in the lower dtype, in float32, or in the widest dtype of its arguments.

torch casts in C++ and for its own devices only, but the header with its lists, ``ATen/autocast_mode.h``, comes with
every torch: they are read from there, so that an operator is cast here exactly if that torch casts it on CUDA.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._pytree import tree_map_only

_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_KEYS = torch._C.DispatchKeySet(getattr(DispatchKey, "AutocastPrivateUse1"))  # noqa: B009 (torch's stubs lack it)
_without = torch._C._ExcludeDispatchKeyGuard
_WIDTH = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}

DTypeFor = Callable[[list[torch.Tensor]], torch.dtype | None]


def kernels() -> list[torch.library.Library]:
    """Everything under autocast's key of the fake device; what is in no list passes through."""
    through = torch.library.Library("_", "IMPL")
    through.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    casting = torch.library.Library("aten", "IMPL")
    for name, dtype_for in _rules().items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None:  # the header also names what only builds for other devices have
            casting.impl(op, _casting(op, dtype_for), "AutocastPrivateUse1")
    casting.impl("binary_cross_entropy", _refuse_binary_cross_entropy, "AutocastPrivateUse1")
    return [through, casting]


def supported_dtypes() -> list[torch.dtype]:
    """What ``torch.autocast`` asks first; raises ``RuntimeError`` where this torch came without the lists."""
    if not _HEADER.exists():
        raise RuntimeError(
            f"torch.autocast('fakegpu') takes its lists from a header of torch that is missing: {_HEADER}"
        )
    return [torch.float16, torch.bfloat16, torch.float32]


def _rules() -> dict[str, DTypeFor]:
    if not _HEADER.exists():
        return {}
    header = _HEADER.read_text()
    rules: dict[str, DTypeFor] = dict.fromkeys(_listed(header, "LOWER_PRECISION_FP"), _lower)
    rules |= dict.fromkeys(_listed(header, "PROMOTE"), _widest)
    # those of the second list take a dtype; to cast what they are given comes to the same
    for macro in ("FP32", "FP32_SET_OPT_DTYPE"):
        rules |= dict.fromkeys(_listed(header, macro), _float32)
    return rules


def _listed(header: str, macro: str) -> list[str]:
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", header)
    entries = re.findall(r"_\((\w+(?:, \w+)?)\)", body[1]) if body else []
    return [entry.replace(", ", ".") for entry in entries]


def _casting(op: Any, dtype_for: DTypeFor) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        with _without(_KEYS):
            given: list[torch.Tensor] = []
            tree_map_only(torch.Tensor, given.append, (args, kwargs))
            floating = [t for t in given if t.is_floating_point() and t.dtype in _WIDTH and t.device.type == "fakegpu"]
            dtype = dtype_for(floating)
            if dtype is not None:
                eligible = {id(tensor) for tensor in floating if tensor.dtype is not torch.float64}
                to = _cached_cast if dtype_for is _lower else torch.Tensor.to
                args, kwargs = tree_map_only(
                    torch.Tensor, lambda t: to(t, dtype) if id(t) in eligible else t, (args, kwargs)
                )
            return op(*args, **kwargs)

    return cast


def _cached_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights are cast once and the result is kept until autocast ends, of all threads (``autocast_mode.cpp``): that is
    memory of the device, and one gradient in the lower dtype."""
    of_a_weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    if not of_a_weight or not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    with _lock:
        weight, cast = _casts.get(id(tensor), (None, None))
        if cast is None or weight is None or weight() is not tensor:
            cast = tensor.to(dtype)
            _casts[id(tensor)] = weakref.ref(tensor), cast
    return cast


_casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
_lock = threading.RLock()
_native_clear: Callable[[], None] = torch.clear_autocast_cache


def forget_casts() -> None:
    """What ``torch.autocast`` calls at its end."""
    _native_clear()
    _casts.clear()


def patches() -> Iterator[tuple[Any, str, Any]]:
    yield torch, "clear_autocast_cache", forget_casts


def _lower(tensors: list[torch.Tensor]) -> torch.dtype | None:
    return torch.get_autocast_dtype("fakegpu")


def _float32(tensors: list[torch.Tensor]) -> torch.dtype | None:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype | None:
    return max((t.dtype for t in tensors), key=_WIDTH.__getitem__, default=None)


def _refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; use"
        " binary_cross_entropy_with_logits or BCEWithLogitsLoss, as on CUDA"
    )
