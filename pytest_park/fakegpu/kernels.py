"""The one kernel of the fake device: borrow the CPU's.

It serves every operator that has no kernel of its own in ``own_kernels``: the device tensors among the arguments are
seen as CPU tensors over the same memory, the CPU's kernel runs, and what it made becomes device memory. Operators that
only look at sizes and strides (views) run on the device tensors themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from . import active, autocast, mixed_devices, own_kernels
from .kernel_errors import as_on_a_gpu
from .ledger import adopt
from .random import is_of_a_device
from .sanitizer import Footprint
from .tensors import bytes_of, host_part, host_view, share_memory
from .without_data import stand_in

Kernel = Callable[..., Any]

_PLAIN = frozenset((int, float, bool, type(None), torch.dtype, torch.layout, torch.memory_format, str, complex))
_HOST_KEY = DispatchKeySet(DispatchKey.CPU)
_registrations = torch._C._dispatch_get_registrations_for_dispatch_key
_kernels: dict[OpOverload, Kernel] = {}
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Give torch the kernels; they stay, because they do nothing without a device tensor.

    A boxed fallback would do for everything, but torch prefers its own generic kernel to a fallback: an operator in a
    structured family would be taken apart into an allocation and an ``out=`` call. So those that the CPU has a kernel
    for are also registered by name; that halves the cost of an operator and gives the CPU's own output strides.
    """
    if _libraries:
        return
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    by_name = torch.library.Library("aten", "IMPL")
    generic = set(_registered_for("CompositeExplicitAutogradNonFunctional")) | set(
        _registered_for("CompositeExplicitAutograd")
    )
    for qualified in sorted(
        generic.intersection(_registered_for("CPU")) - own_kernels.names() | _WHOLE | _VIEWS | _CLOSED
    ):
        name, _, overload = qualified.removeprefix("aten::").partition(".")
        if qualified.startswith("aten::"):
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            by_name.impl(op, kernel_of(op), "PrivateUse1")
    _libraries.extend((everything, by_name, own_kernels.library(), *autocast.kernels()))


def _registered_for(key: str) -> list[str]:
    return _registrations(key)


def _fallback(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    kernel = _kernels.get(op)
    if kernel is None:
        kernel = _kernels[op] = kernel_of(op)
    try:
        return kernel(*args, **kwargs)
    except BaseException as error:
        args, kwargs = (), {}
        as_on_a_gpu(error)
        raise


def kernel_of(op: OpOverload) -> Kernel:
    """The kernel that serves *op* on the fake device."""
    returned = [value.alias_info for value in op._schema.returns]
    is_view = torch.Tag.inplace_view in op.tags or any(alias is not None and not alias.is_write for alias in returned)
    if is_view or op is torch.ops.aten.is_set_to.default:  # which compares storages
        return _on_device_tensors(op)
    outs = [argument.name for argument in op._schema.arguments if argument.is_out]
    if outs:
        return _writing_out(op, outs)
    kernel = _on_host_views(op)
    if torch.Tag.nondeterministic_seeded in op.tags and not _takes_generator(op):
        return _with_device_numbers(kernel)
    return kernel


def _takes_generator(op: OpOverload) -> bool:
    return any(argument.name == "generator" for argument in op._schema.arguments)


def _is_of_a_wrapped_number(error: RuntimeError) -> bool:
    """torch hands a number that it wrapped as a tensor over as a number; the name alone then finds the overload."""
    return "Cast error details: Unable to cast" in str(error)


def _on_device_tensors(op: OpOverload) -> Kernel:
    """Views share the storage of the device tensor, so the CPU's kernel gets that tensor and not a view of it."""
    return functools.partial(op._handle.redispatch_boxed, _HOST_KEY)


def _on_host_views(op: OpOverload) -> Kernel:
    run = op._op
    takes_generator = _takes_generator(op)
    writes = op._schema.is_mutable
    footprint = Footprint(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        host_args: Any = []
        previous = value = result = None
        try:
            if kwargs or takes_generator or active.without_data:
                return with_all_cases(args, kwargs)
            # the common case, written out: device tensors of one device and plain values in, one tensor out
            index = -2  # none yet; -1 is the host
            for value in args:
                if isinstance(value, Tensor):
                    at = value.get_device()
                    if at != index:
                        if at < 0 or index != -2:
                            return with_all_cases(args, kwargs)
                        index = at
                    if writes and previous is not None and share_memory(value, args[0]):
                        return with_all_cases(args, kwargs)
                    host_args.append(host_args[-1] if value is previous else host_view(value))  # x + x needs one view
                    previous = value
                elif type(value) in _PLAIN:
                    host_args.append(value)
                else:
                    return with_all_cases(args, kwargs)
            try:
                result = run(*host_args)
            except RuntimeError as error:
                result = with_numbers(error, host_args, kwargs)
            if type(result) is Tensor:
                for position, value in enumerate(host_args):
                    if value is result:
                        result = args[position]
                        break
                else:
                    result = adopt(result, index)
            else:
                result = Call(op, args, host_args, index).to_device(result)
            if active.sanitizer is not None:
                active.sanitizer.launched(footprint, index, args, kwargs, result)
            return result
        except BaseException as error:
            args, kwargs, host_args, previous, value, result = (), {}, None, None, None, None
            as_on_a_gpu(error)
            raise

    def with_all_cases(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(op)
        if writes:
            call.share(args, kwargs)
        host_args = [call.to_host(value) for value in args]
        host_kwargs = call.to_host_by_name(kwargs, takes_generator)
        if call.elsewhere:
            mixed_devices.refuse(op, call.originals, call.elsewhere, args, kwargs)
        try:
            result = run(*host_args, **host_kwargs)
        except RuntimeError as error:
            result = with_numbers(error, host_args, host_kwargs)
        return watched(footprint, call.index, args, kwargs, call.to_device(result))

    def with_numbers(error: RuntimeError, host_args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not _is_of_a_wrapped_number(error):
            raise error
        return op.overloadpacket(*host_args, **kwargs)

    return kernel


def _with_device_numbers(kernel: Kernel) -> Kernel:
    """For what draws from the default generator without saying so, like dropout: the host's, so it is lent a state."""

    def drawing(*args: Any, **kwargs: Any) -> Any:
        generator = active.card(next(t.get_device() for t in args if isinstance(t, Tensor))).generator
        host = torch.default_generator
        state = host.get_state()
        host.set_state(generator.get_state())
        try:
            return kernel(*args, **kwargs)
        finally:
            generator.set_state(host.get_state())
            host.set_state(state)

    return drawing


def _writing_out(op: OpOverload, outs: list[str]) -> Kernel:
    """``out=``: the CPU's kernel may want to resize what is empty, which it can only do to memory of its own."""
    run = op._op
    takes_generator = _takes_generator(op)
    footprint = Footprint(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = Call(op)
        call.share(args, kwargs)
        host_args = [call.to_host(value) for value in args]
        host_kwargs = call.to_host_by_name(kwargs, takes_generator)
        if call.elsewhere:
            mixed_devices.refuse(op, call.originals, call.elsewhere, args, kwargs)
        given = [(kwargs[name], name) for name in outs if name in kwargs]
        fresh = {name: torch.empty(0, dtype=out.dtype, device=call.host) for out, name in given}
        written = host_kwargs | {name: fresh[name] for out, name in given if not out.numel()}
        try:
            result = run(*host_args, **written)
        except RuntimeError as error:
            if _is_of_a_wrapped_number(error):
                result = op.overloadpacket(*host_args, **written)
            elif "not resizable" in str(error):
                written = host_kwargs | fresh
                result = run(*host_args, **written)
            else:
                raise
        for out, name in given:
            if written[name] is fresh[name]:
                _take_over(fresh[name], out, call.index)
            elif out.shape != written[name].shape:
                out.set_(out.untyped_storage(), out.storage_offset(), written[name].size(), written[name].stride())
        watched(footprint, call.index, args, kwargs, None)
        if isinstance(result, Tensor):
            return given[0][0]
        return tuple(out for out, _ in given) if isinstance(result, tuple) else result

    return kernel


def _take_over(fresh: Tensor, out: Tensor, index: int) -> None:
    """Give *out* what the kernel wrote to *fresh*: in its own memory, as far as it has any."""
    if out.shape != fresh.shape:
        if not out.untyped_storage().nbytes():
            out.set_(adopt(fresh, index).untyped_storage(), 0, fresh.size(), fresh.stride())
            return
        out.resize_(fresh.shape)
        out.set_(out.untyped_storage(), int(out.storage_offset()), fresh.size(), fresh.stride())
    if fresh.numel() and active.has_data():
        host_view(out).copy_(fresh)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The device tensors in *value*."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Tensor) and value.get_device() >= 0:
        yield value


def watched(footprint: Footprint, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """*result*, after the sanitizer has seen the call, if it has begun."""
    if active.sanitizer is not None:
        active.sanitizer.launched(footprint, index, args, kwargs, result)
    return result


class Call:
    """One call on its way to the CPU's kernel and back: which device it is on, which tensor stands for which."""

    __slots__ = ("elsewhere", "host", "index", "op", "originals", "shared", "views")

    def __init__(
        self, op: OpOverload, originals: Sequence[Any] = (), views: Sequence[Any] = (), index: int = -1
    ) -> None:
        self.op = op
        self.index = index
        self.host = active.where_kernels_run()
        self.originals = list(originals)
        self.views = list(views)
        self.elsewhere: list[Tensor] = []
        self.shared: dict[int, Tensor] = {}

    def share(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show the kernel that arguments share memory: one that writes refuses those that overlap with what it writes
        (``MemoryOverlap.cpp``)."""
        if active.without_data:
            return
        seen: set[int] = set()
        for tensor in _tensors((args, tuple(kwargs.values()))):
            key = tensor.untyped_storage()._cdata
            if key in seen and key not in self.shared:
                self.shared[key] = host_view(bytes_of(tensor))
            seen.add(key)

    def to_host(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            index = value.get_device()
            if index < 0:
                self.elsewhere.append(value)
                return value
            if index != self.index:
                if self.index >= 0:
                    self.elsewhere.append(value)
                self.index = index
            memory = self.shared.get(value.untyped_storage()._cdata) if self.shared else None
            view = stand_in(value) if memory is None else host_part(memory, value)
            self.originals.append(value)
            self.views.append(view)
            return view
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self.to_host(item) for item in value])
        if kind is torch.device and value.type == "fakegpu":
            self.index = active.index_of(value)
            return torch.device(self.host)
        return value

    def to_host_by_name(self, kwargs: dict[str, Any], takes_generator: bool) -> dict[str, Any]:
        found = {name: self.to_host(value) for name, value in kwargs.items()}
        if takes_generator and active.has_data():
            given = kwargs.get("generator")
            if given is None:
                found["generator"] = active.card(self.index).generator
            elif not is_of_a_device(given):
                raise RuntimeError("Expected a 'fakegpu' device type for generator but found 'cpu'")
        return found

    def to_device(self, result: Any) -> Any:
        """What the CPU's kernel returned: an argument is handed back as itself, every other tensor is fresh."""
        if isinstance(result, Tensor):
            for position, view in enumerate(self.views):
                if view is result:
                    return self.originals[position]
            return adopt(result, self.index)
        if isinstance(result, list | tuple):
            return type(result)([self.to_device(item) for item in result])
        return result


#: Composites of an allocation and a copy, so frequent in models that they run as one.
_WHOLE = {"aten::clone", "aten::constant_pad_nd"}
#: Composites that know torch's own devices only.
_CLOSED = {"aten::mode.values"}
#: The views that all others are made of: by name they do not even enter Python.
_VIEWS = {"aten::view", "aten::as_strided", "aten::_reshape_alias"}
