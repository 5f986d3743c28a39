"""What a parameter is while it is parked: it answers for its host copy, and no kernel sees the placeholder."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

#: The host copy of every parked parameter.
PARKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

ON_HOST = {"shape", "dtype", "layout", "ndim", "nbytes", "itemsize", "data", "numel", "size", "stride", "dim"}
ON_HOST |= {"element_size", "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "untyped_storage"}
ON_HOST |= {"detach", "nelement", "__len__", "is_sparse", "is_quantized"}
ON_SELF = {"device", "requires_grad", "requires_grad_", "grad", "is_leaf", "grad_fn", "_version", "is_inference"}
ON_SELF |= {"is_meta", "register_hook", "_backward_hooks", "retain_grad", "retains_grad", "_cdata", "__hash__"}


class ParkedError(RuntimeError):
    """A parked weight was needed."""


class Parked:
    """Mixed into the class of a parameter for as long as it is parked; *kind* is that class."""

    kind: type

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        what = name_of(function)
        with torch._C.DisableTorchFunctionSubclass():
            if what in ON_SELF:
                return function(*args, **kwargs)
            is_write = what == "__setitem__" or (what.endswith("_") and (what[-2] != "_" or what.startswith("__i")))
            if what in ON_HOST or (is_write and isinstance(args[0], Parked)):
                result = function(*map(_on_host, args), **{name: _on_host(value) for name, value in kwargs.items()})
                return args[0] if is_write else result
        raise ParkedError(f"{what} needs a weight that is parked on the host: call restore() first")

    @property
    def data(self) -> torch.Tensor:
        """Assigned to, it is the host copy that changes."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        PARKED[self] = value.detach().cpu().clone()

    def __deepcopy__(self, memo: Any) -> Any:
        raise ParkedError("a parked weight cannot be copied: call restore() first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParkedError("a parked weight cannot be pickled: call restore() first")


def name_of(function: Any) -> str:
    """What a function of torch does, with properties under their own names."""
    if function.__name__ in ("__get__", "__set__"):
        return str(function.__self__.__name__)
    return str(function.__name__)


_CLASSES: dict[tuple[type, type], type] = {}


def parked_class(kind: type, disguise: type[Parked]) -> type:
    if (kind, disguise) not in _CLASSES:
        _CLASSES[kind, disguise] = type(f"Parked{kind.__name__}", (disguise, kind), {"kind": kind})
    return _CLASSES[kind, disguise]


def _on_host(value: Any) -> Any:
    if isinstance(value, Parked):
        return PARKED[value]
    return value.detach().cpu() if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value
