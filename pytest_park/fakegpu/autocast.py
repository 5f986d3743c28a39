"""``torch.autocast("fakegpu")``: what runs in the lower dtype, in float32, or in the widest dtype of its arguments.

The lists are those of ``aten/src/ATen/autocast_mode.h`` for CUDA (``AT_FORALL_LOWER_PRECISION_FP``, ``AT_FORALL_FP32``,
``AT_FORALL_PROMOTE``), which torch applies in C++ for its own devices only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._pytree import tree_map_only

_LOWER = (
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "gru_cell", "lstm_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "norm.Scalar", "nuclear_norm", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "prod", "prod.dim_int",
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList",
)  # fmt: skip
_WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add", "cat", "stack",
)  # fmt: skip

_KEYS = torch._C.DispatchKeySet(getattr(DispatchKey, "AutocastPrivateUse1"))  # noqa: B009 (torch's stubs lack it)
_WIDTH = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


def kernels() -> list[torch.library.Library]:
    """Everything under autocast's key of the fake device; what is in no list passes through."""
    through = torch.library.Library("_", "IMPL")
    through.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    casting = torch.library.Library("aten", "IMPL")
    for names, chosen in ((_LOWER, _lower), (_FLOAT32, _float32), (_WIDEST, _widest)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if op is not None:
                casting.impl(op, _casting(op, chosen), "AutocastPrivateUse1")
    return [through, casting]


def _casting(op: Any, dtype_for: Callable[[list[torch.Tensor]], torch.dtype | None]) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            floating: list[torch.Tensor] = []
            tree_map_only(torch.Tensor, floating.append, (args, kwargs))
            floating = [
                t for t in floating if t.is_floating_point() and t.dtype in _WIDTH and t.device.type == "fakegpu"
            ]
            dtype = dtype_for(floating)
            if dtype is not None:
                eligible = {id(tensor) for tensor in floating if tensor.dtype is not torch.float64}
                args, kwargs = tree_map_only(
                    torch.Tensor, lambda t: t.to(dtype) if id(t) in eligible else t, (args, kwargs)
                )
            return op(*args, **kwargs)

    return cast


def _lower(tensors: list[torch.Tensor]) -> torch.dtype | None:
    return torch.get_autocast_dtype("fakegpu")


def _float32(tensors: list[torch.Tensor]) -> torch.dtype | None:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype | None:
    return max((t.dtype for t in tensors), key=_WIDTH.__getitem__, default=None)
