"""The few operators for which borrowing is not enough: making memory, copying, resizing, reading one element."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import suggest_memory_format

from . import active, attention, mixed_devices, recurrent, storages
from .kernel_errors import NoHostMemory, as_on_a_gpu
from .ledger import adopt
from .pinned import is_pinned
from .sanitizer import Footprint
from .tensors import bytes_of, host_part, host_view, share_memory
from .without_data import refuse_values, stand_in

if TYPE_CHECKING:
    from .device import Direction

#: Every byte of fresh memory. As a float of any width this is NaN, so what reads memory before writing it shows.
POISON = 0xFF


def names() -> set[str]:
    """The operators that have a kernel here, as torch names them."""
    return {f"aten::{name}" for name in _all()}


def _all() -> dict[str, Callable[..., Any]]:
    return _KERNELS | attention.KERNELS | recurrent.KERNELS


def library() -> torch.library.Library:
    """The kernels below under the key of the fake device."""
    kernels = torch.library.Library("aten", "IMPL")
    for name, kernel in _all().items():
        kernels.impl(name, _registered(name, kernel), "PrivateUse1")
    # attention decides above autograd, which differentiates what was decided
    kernels.impl(
        "scaled_dot_product_attention", attention.KERNELS["scaled_dot_product_attention"], "AutogradPrivateUse1"
    )
    # torch resolves lazy conjugation and negation by cloning, and clones by copying: the copy itself must do it
    for key in ("Conjugate", "Negative"):
        kernels.impl("_copy_from", torch.library.fallthrough_kernel, key)
    return kernels


def _registered(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    footprint = Footprint(op)
    tells = name not in _NO_ACCESS

    def registered(*args: Any, **kwargs: Any) -> Any:
        try:
            result = kernel(*args, **kwargs)
            if tells and active.sanitizer is not None:
                index = next(value.get_device() for value in args if isinstance(value, torch.Tensor))
                active.sanitizer.launched(footprint, index, args, kwargs, result)
            return result
        except BaseException as error:
            args, kwargs = (), {}
            as_on_a_gpu(error)
            raise

    return registered


def _fresh(host: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Fresh memory of the device for *host*, poisoned; a meta tensor stands for memory without data."""
    fresh = adopt(host, active.index_of(device))
    nbytes = fresh.untyped_storage().nbytes()
    if nbytes and not host.is_meta:
        ctypes.memset(host.data_ptr(), POISON, nbytes)
    return fresh


def _empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"fakegpu has no {layout} tensors")
    if pin_memory:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    memory_format = torch.contiguous_format if memory_format is None else memory_format
    return _fresh(
        torch.empty(size, dtype=dtype, device=active.where_kernels_run(), memory_format=memory_format), device
    )


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return _fresh(torch.empty_strided(size, stride, dtype=dtype, device=active.where_kernels_run()), device)


def _copy_from(source: torch.Tensor | complex, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)`` where at least one of the two is on a fake device.

    torch hands a number that it wrapped as a tensor over as a number.
    """
    if not isinstance(source, torch.Tensor):
        return target.fill_(source)
    if source.device == target.device:
        _watch_copy(source, target)
        if active.has_data():
            _copy_bytes(source, target)
    else:
        transfer(source, target, non_blocking)
    return target


def transfer(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """A copy between host and device or between devices, on the current stream of the device.

    Blocking means that the host waits for the stream. Not blocking, to pinned memory: the bytes arrive when the host
    waits (until then the host sees poison), because on a GPU nobody knows when else.
    """
    kind: Direction = "h2d" if source.is_cpu else "d2h" if target.is_cpu else "d2d"
    card = active.card((target if kind != "d2h" else source).get_device())
    pinned = is_pinned(source if kind == "h2d" else target)
    if non_blocking and not pinned and kind != "d2d" and source.nbytes and active.stream(card.index):
        card.sanitizer.refuse(_PAGEABLE)  # on the default stream it is common, and only slow
    card.copied(kind, source.nbytes, pinned=pinned, blocking=not non_blocking)
    if kind == "h2d" and pinned:
        card.pending.deliver_to(source)
    seq = _watch_copy_between_devices(source, target) if kind == "d2d" else _watch_copy(source, target)
    if active.has_data():
        if kind == "d2h" and non_blocking and pinned:
            card.pending.add(card.current_stream_key(), seq, _snapshot(source, target), target)
            return
        _copy_bytes(source, target)
    if kind != "d2d" and not non_blocking:
        card.stream_synchronized(active.stream(card.index))


_PAGEABLE = (
    "a pageable buffer used asynchronously: a non-blocking copy on a side stream, to or from host memory that is not"
    " pinned, blocks that stream's queue or reads the buffer after the call has returned. Pin the buffer"
    " (pin_memory=True), or copy blocking"
)


def _watch_copy(source: torch.Tensor, target: torch.Tensor) -> int:
    if active.sanitizer is None:
        return 0
    index = target.get_device() if source.is_cpu else source.get_device()
    return active.sanitizer.launched(_COPY, index, (target, source), {}, None)


def _watch_copy_between_devices(source: torch.Tensor, target: torch.Tensor) -> int:
    """It runs on the stream of the source, and the stream of the target waits before and after (``cuda/Copy.cu``)."""
    of_source, of_target = (active.card(tensor.get_device()).current_stream_key() for tensor in (source, target))
    active.cards[0].sanitizer.ordered(of_target, of_source)
    seq = _watch_copy(source, target)
    active.cards[0].sanitizer.ordered(of_source, of_target)
    return seq


_COPY = Footprint(torch.ops.aten.copy_.default)


def _snapshot(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What the copy will bring, as it is now; the target holds poison until then."""
    arriving = torch.empty_like(target, device="cpu", pin_memory=False)
    _copy_bytes(source, arriving)
    bytes_of_target = torch.full((target.element_size(),), POISON, dtype=torch.uint8, device="cpu").view(target.dtype)
    target.copy_(bytes_of_target.expand(target.shape) if target.dim() else bytes_of_target[0])
    return arriving


def _copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    if not source.is_cpu and share_memory(source, target):  # of which the CPU refuses what overlaps
        memory = host_view(bytes_of(source))
        host_source, host_target = host_part(memory, source), host_part(memory, target)
    else:
        host_source = source if source.is_cpu else host_view(source)
        host_target = target if target.is_cpu else host_view(target)
    try:
        host_target.copy_(host_source)
    except NotImplementedError:  # the CPU cannot copy dtypes smaller than a byte; a device copies bytes
        if source.device == target.device or source.dtype is not target.dtype:
            raise
        host_target.view(torch.uint8).copy_(host_source.view(torch.uint8))


def _to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """``tensor.to(...)`` that copies. Non-blocking to the host it makes pinned memory, as on CUDA (``_to_copy``)."""
    memory_format = torch.preserve_format if memory_format is None else memory_format
    to = source.device if device is None else device
    if to == source.device:
        return adopt(stand_in(source).to(dtype or source.dtype, copy=True, memory_format=memory_format), to.index)
    pin_memory = non_blocking and to.type == "cpu"
    try:
        target = torch.empty_like(source, dtype=dtype, device=to, memory_format=memory_format, pin_memory=pin_memory)
    except RuntimeError as error:
        if to.type != "cpu":
            raise
        raise NoHostMemory(*error.args) from None
    return target.copy_(source, non_blocking)


def _efficientzerotensor(size: Any, **options: Any) -> torch.Tensor:
    """torch's zeros without memory have no address that a kernel could read; here they get memory."""
    return torch.zeros(size, **options)


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """The memory of *tensor* may not be reused before the work that *stream* has when it is freed."""
    entry = active.card(tensor.get_device()).entries.get(tensor.untyped_storage()._cdata)
    if entry is not None and stream.stream_id != entry.block.stream:
        entry.block.uses = {*(entry.block.uses or ()), stream.stream_id}


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target.resize_(source.shape)
    return _copy_from(source, target)


def _resize_(tensor: torch.Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """Like the CPU's: nothing happens for its own size; growth is growth of the storage, which all its views see."""
    if tuple(size) == tuple(tensor.shape) and memory_format in (None, torch.preserve_format):
        return tensor
    wanted = torch.empty(size, dtype=tensor.dtype, device="meta")
    if memory_format not in (None, torch.preserve_format):
        wanted = wanted.contiguous(memory_format=memory_format)
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    needed = int(offset + wanted.numel()) * tensor.element_size()
    if needed > storage.nbytes():
        storage = storages.grown(tensor, needed)
    return tensor.set_(storage, offset, wanted.shape, wanted.stride())


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    if not active.has_data():
        refuse_values("item()")
    value = host_view(tensor).item()
    card = active.card(tensor.get_device())
    card.stream_synchronized(active.stream(card.index))  # the host waits for the value
    return value


def _convolution(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *geometry: Any) -> torch.Tensor:
    mixed_devices.same(input, weight, bias)
    of_bias = None if bias is None else stand_in(bias)
    result = torch.ops.aten.convolution(stand_in(input), stand_in(weight), of_bias, *geometry)
    if result.is_meta:
        result = _like_channels_of(result, input, weight)
    return adopt(result, input.get_device())


def _like_channels_of(result: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """Channels last if one of *sources* is, as real convolutions have it; torch's meta kernel forgets that."""
    formats = {suggest_memory_format(source) for source in sources} - {torch.contiguous_format}
    return result.contiguous(memory_format=formats.pop()) if formats else result


def _convolution_backward(
    grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *geometry: Any
) -> tuple[torch.Tensor | None, ...]:
    *rest, output_mask = geometry
    bias_sizes = [weight.shape[1] * rest[-1] if rest[3] else weight.shape[0]]
    gradients = torch.ops.aten.convolution_backward(
        stand_in(grad_output), stand_in(input), stand_in(weight), bias_sizes, *rest, output_mask
    )
    index = input.get_device()
    return tuple(
        adopt(gradient, index) if wanted else None for gradient, wanted in zip(gradients, output_mask, strict=True)
    )


#: These touch no bytes, or by way of others, or tell more than their schema says.
_NO_ACCESS = {
    "empty.memory_format", "empty_strided", "_to_copy", "resize_", "record_stream", "_copy_from",
    "_copy_from_and_resize", "scaled_dot_product_attention", "_efficientzerotensor",
}  # fmt: skip

_KERNELS: dict[str, Callable[..., Any]] = {
    "_to_copy": _to_copy,
    "_efficientzerotensor": _efficientzerotensor,
    "record_stream": _record_stream,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "resize_": _resize_,
    "_local_scalar_dense": _local_scalar_dense,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
