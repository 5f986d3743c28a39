"""Tensors that wrap others: `Pair`, as quantised weights of torchao and quanto do, and torch's own DTensor."""

from __future__ import annotations

from typing import Any

import torch

from .verdict import NotApplicable


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether its class is a wrapper that tells what it wraps. The tensor itself is not asked: it may be parked."""
    return hasattr(type(tensor), "__tensor_flatten__")


class Pair(torch.Tensor):
    """Wraps *first* and *second*; every operation is done on both."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device, requires_grad=False
        )
        made.first, made.second = first, second
        assert isinstance(made, Pair)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Pair({self.first!r}, {self.second!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Pair:
        return Pair(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = [
            function(*_side(args, side), **_side(kwargs or {}, side))  # both sides in turn
            for side in ("first", "second")
        ]
        if isinstance(results[0], torch.Tensor):
            if function._schema.name.endswith("_"):
                return args[0]
            return Pair(*results)
        return results[0]


def is_dtensor(tensor: torch.Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # takes seconds, so not for those who have none

    return isinstance(tensor, DTensor)


def dtensor(local: torch.Tensor) -> torch.Tensor:
    """*local* as a DTensor over a mesh of this one process, without a process group: nothing is communicated.

    `NotApplicable` where this build of torch has no such thing.
    """
    if not torch.distributed.is_available():
        raise NotApplicable("this build of torch has no torch.distributed, and so no DTensor")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    try:
        mesh = DeviceMesh(local.device.type, [0], _init_backend=False, _rank=0)
    except TypeError as error:
        raise NotApplicable(f"this version of torch makes no mesh without a process group: {error}") from None
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def _side(value: Any, side: str) -> Any:
    if isinstance(value, Pair):
        return getattr(value, side)
    if isinstance(value, list | tuple):
        return type(value)(_side(part, side) for part in value)
    if isinstance(value, dict):
        return {name: _side(part, side) for name, part in value.items()}
    return value
