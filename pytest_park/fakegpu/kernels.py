"""The one kernel of the fake device: borrow the CPU's.

A boxed fallback serves every operator that has no kernel of its own in ``own_kernels``: the device tensors among the
arguments are seen as CPU tensors over the same memory, the CPU's kernel runs, and what it made becomes device memory.
Operators that only look at sizes and strides (views) run on the device tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from . import active, own_kernels
from .ledger import adopt
from .random import generator_for
from .tensors import host_view

Kernel = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_HOST_KEY = DispatchKeySet(DispatchKey.CPU)
_kernels: dict[OpOverload, Kernel] = {}
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Give torch the kernels; they stay, because they do nothing without a device tensor."""
    if _libraries:
        return
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    _libraries.extend((everything, own_kernels.library()))


def _fallback(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    kernel = _kernels.get(op)
    if kernel is None:
        kernel = _kernels[op] = _kernel_of(op)
    return kernel(args, kwargs)


def _kernel_of(op: OpOverload) -> Kernel:
    schema = op._schema
    aliased = [returned.alias_info for returned in schema.returns]
    if torch.Tag.inplace_view in op.tags or any(alias is not None and not alias.is_write for alias in aliased):
        return _on_the_device_tensors(op)
    written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return _on_host_views(op, bool(written))


def _on_the_device_tensors(op: OpOverload) -> Kernel:
    """Views share the storage of the device tensor, so the CPU's kernel must get that tensor and not another view."""

    def kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op.redispatch(_HOST_KEY, *args, **kwargs)

    return kernel


class _Call:
    """One call on its way to the CPU's kernel: which device it is on, and which tensor stands for which."""

    __slots__ = ("index", "name", "originals", "strangers")

    def __init__(self, name: str) -> None:
        self.name = name
        self.index = -1
        self.originals: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.strangers: list[torch.Tensor] = []

    def to_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            index = value.get_device()
            if index < 0:
                if value.dim():
                    self.strangers.append(value)
                return value
            if value.device.type != "fakegpu":
                self.strangers.append(value)
                return value
            if self.index < 0:
                self.index = index
            elif index != self.index:
                self.strangers.append(value)
            view = host_view(value)
            self.originals.append((view, value))
            return view
        if isinstance(value, list | tuple):
            return type(value)([self.to_host(item) for item in value])
        if isinstance(value, torch.device):
            if value.type == "fakegpu":
                self.index = active.current() if value.index is None else value.index
                return torch.device("cpu")
            return value
        if isinstance(value, torch.Generator):
            return generator_for(value)
        return value


def _on_host_views(op: OpOverload, writes: bool) -> Kernel:
    run = op._op
    name = op._schema.name
    takes_host_indices = any(argument.name == "indices" for argument in op._schema.arguments)
    generator_argument = any(argument.name == "generator" for argument in op._schema.arguments)
    outs = [a.name for a in op._schema.arguments if a.is_out]

    def kernel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(name)
        host_args = [call.to_host(value) for value in args]
        host_kwargs = {key: call.to_host(value) for key, value in kwargs.items()} if kwargs else kwargs
        if call.strangers and not (takes_host_indices and not writes):
            _refuse_mixed(call)
        if generator_argument and host_kwargs.get("generator") is None:
            host_kwargs["generator"] = active.card(call.index).generator
        if outs:
            return _with_outs(run, host_args, host_kwargs, kwargs, outs, call)
        result = run(*host_args, **host_kwargs)
        return _to_device(result, call)

    return kernel


def _to_device(result: Any, call: _Call) -> Any:
    """What the CPU's kernel returned, on the device: an argument is handed back as itself, all else is fresh."""
    if isinstance(result, torch.Tensor):
        for view, original in call.originals:
            if view is result:
                return original
        return adopt(result, call.index)
    if isinstance(result, list | tuple):
        return type(result)([_to_device(item, call) for item in result])
    return result


def _with_outs(
    run: Callable[..., Any],
    args: Sequence[Any],
    host_kwargs: dict[str, Any],
    kwargs: dict[str, Any],
    outs: list[str],
    call: _Call,
) -> Any:
    """``out=``: the CPU's kernel may want to resize them, which only memory of its own allows."""
    for name in outs:
        if name in host_kwargs and isinstance(kwargs[name], torch.Tensor) and not kwargs[name].numel():
            host_kwargs[name] = torch.empty(0, dtype=kwargs[name].dtype, device="cpu")
    run(*args, **host_kwargs)
    given = []
    for name in outs:
        if name not in kwargs:
            continue
        out, host = kwargs[name], host_kwargs[name]
        if isinstance(out, torch.Tensor):
            if not out.numel() and host.numel():
                out.set_(adopt(host, call.index))
            elif out.shape != host.shape:
                out.resize_(host.shape)
        given.append(out)
    return given[0] if len(given) == 1 else tuple(given)


def _refuse_mixed(call: _Call) -> None:
    devices = {str(original.device) for _, original in call.originals} | {str(t.device) for t in call.strangers}
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{' and '.join(sorted(devices)[:2])}! (when calling {call.name})"
    )
