"""Tensors of several devices in one call: refused as on CUDA, and taken where CUDA takes them.

torch's build generates a check of all devices into the CUDA kernels, except of operators that look for themselves:
``native_functions.yaml`` marks them. Those also take a number of the host, a tensor without dimensions, but write none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_MESSAGE = "Expected all tensors to be on the same device, but found at least two devices, {}!"
_ENTRY = re.compile(r"^- func: ([\w.]+)\((?:(?!^- func: )[\s\S])*?device_check: NoCheck", re.MULTILINE)
#: ``TensorAdvancedIndexing.cpp`` moves the indices of these to the device of what they index.
_TAKE_HOST_INDICES = {f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_")}
_INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)


def refuse(
    op: OpOverload, here: Sequence[Tensor], elsewhere: list[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise torch's own error for the tensors *elsewhere*, unless CUDA takes them beside those *here*."""
    name = op._schema.name
    if name in _TAKE_HOST_INDICES and all(tensor.is_cpu and tensor.dtype in _INDICES for tensor in elsewhere):
        return
    if _takes_numbers(op) and all(tensor.is_cpu and not tensor.dim() for tensor in elsewhere):
        written = [args[at] if at < len(args) else kwargs.get(by_name) for at, by_name in _written(op)]
        if not any(tensor is value for tensor in elsewhere for value in written):
            return
    devices = sorted({str(tensor.device) for tensor in (*here, *elsewhere)}, reverse=True)
    raise RuntimeError(f"{_MESSAGE.format(' and '.join(devices[:2]))} (in {name})")


def same(first: Tensor, *others: Tensor | None) -> None:
    """Raise torch's own error unless all are on the device of *first*; for kernels that are no torch operator's."""
    for tensor in others:
        if tensor is not None and tensor.device != first.device:
            raise RuntimeError(_MESSAGE.format(f"{first.device} and {tensor.device}"))


@functools.cache
def _written(op: OpOverload) -> list[tuple[int, str]]:
    arguments = enumerate(op._schema.arguments)
    return [(at, arg.name) for at, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]


@functools.cache
def _takes_numbers(op: OpOverload) -> bool:
    namespace, _, name = op._schema.name.partition("::")
    return namespace != "aten" or (f"{name}.{op._schema.overload_name}".rstrip(".") in _without_check())


@functools.cache
def _without_check() -> frozenset[str]:
    found = find_spec("torchgen")  # a part of torch
    assert found is not None
    assert found.origin is not None
    entries = Path(found.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    return frozenset(_ENTRY.findall(entries.read_text()))
