"""Fused attention: like a GPU's flash kernel, it must not materialise the matrix of all queries with all keys.

torch has a kernel pair for back ends from outside, ``_scaled_dot_product_fused_attention_overrideable``, but takes it
only where C++ registered a choice (``_fused_sdp_choice_stub``). So the choice is made here, where the operator arrives:
the CPU's flash kernels wherever the CPU itself would take them, torch's plain formula elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.backends.cuda import flash_sdp_enabled
from torch.nn.attention import SDPBackend

from .ledger import adopt
from .tensors import host_view
from .without_data import stand_in

_choose: Any = torch._fused_sdp_choice
_keys_of: Any = torch._C._dispatch_keys
_is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_MATH = int(SDPBackend.MATH.value)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if min(query.dim(), key.dim(), value.dim()) < 2 or not query.dtype == key.dtype == value.dtype:
        given = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (query, key, value))
        raise RuntimeError(f"Expected query, key, and value of one dtype and at least 2 dimensions; got {given}")
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    if _flash(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
        if query.dim() == 3:  # without a batch, which torch takes fused since 2.14 (normalize_unbatched_input)
            mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
            output: Tensor = fused(query[None], key[None], value[None], mask, dropout_p, is_causal, scale=scale)[0]
            return output[0]
        output = fused(query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale)[0]
        return output
    plain = torch.ops.aten._scaled_dot_product_attention_math
    output = plain(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return output


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: Any, gqa: bool
) -> bool:
    given = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    if len({tensor.device for tensor in given}) > 1 or (mask is not None and mask.requires_grad):
        return False  # the plain formula names the devices; the flash kernels have no gradient for a mask
    if key.shape[:-1] != value.shape[:-1] or query.shape[:-2] != key.shape[:-2] or query.shape[-1] != key.shape[-1]:
        return False  # the plain formula broadcasts, or names the shapes; the flash kernels do not look
    wrapped = [tensor for tensor in given if _is_wrapped(tensor)]
    if wrapped:  # no memory that the CPU could be asked about; other wrappers than tracers do not know the fused kernel
        fits = query.dim() in (3, 4) and (mask is None or mask.dim() in (2, 4)) and query.is_floating_point()
        traced = all(isinstance(tensor, FakeTensor | FunctionalTensor) for tensor in wrapped)
        return traced and fits and not dropout and flash_sdp_enabled()
    views = [None if tensor is None else host_view(tensor) for tensor in (query, key, value, mask)]  # no byte is read
    return bool(_choose(*views, dropout, causal, scale=scale, enable_gqa=gqa) != _MATH)


def _is_wrapped(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor and _keys_of(tensor).has(DispatchKey.Python):  # only a class of its own can have that
        return True
    return _is_functorch_wrapped(tensor)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        stand_in(query),
        stand_in(key),
        stand_in(value),
        dropout_p,
        is_causal,
        attn_mask=None if attn_bias is None else stand_in(attn_bias),
        scale=scale,
    )
    index = query.get_device()
    none = torch.empty(0, dtype=torch.int64, device=query.device)  # of no use without variable lengths and dropout
    return (
        adopt(output, index), adopt(logsumexp, index), none, none, query.shape[-2], key.shape[-2], none, none, none,
    )  # fmt: skip


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    grad_input_mask: list[bool],
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(stand_in(tensor) for tensor in (grad_out, query, key, value, out, logsumexp)),
        dropout_p,
        is_causal,
        attn_mask=None if attn_bias is None else stand_in(attn_bias),
        scale=scale,
    )
    return (*(adopt(gradient, query.get_device()) for gradient in gradients), None)


KERNELS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _forward,
    "_scaled_dot_product_fused_attention_overrideable_backward": _backward,
}
