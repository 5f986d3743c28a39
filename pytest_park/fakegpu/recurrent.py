"""The fused cells of LSTM and GRU, which torch takes on every device but the CPU, so the CPU has no kernel to borrow.

The equations and the layout of the workspaces are those of ``aten/src/ATen/native/cuda/RNN.cu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import mixed_devices
from .ledger import adopt
from .without_data import stand_in


def _host(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else stand_in(tensor) for tensor in tensors]


def _on_device(index: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else adopt(tensor.contiguous(), index) for tensor in tensors)


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    mixed_devices.same(input_gates, hidden_gates, input_bias, hidden_bias, cx)
    given = _host(input_gates, hidden_gates, input_bias, hidden_bias)
    gates = sum(tensor for tensor in given if tensor is not None)
    i, f, g, o = torch.as_tensor(gates).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * stand_in(cx) + i * g
    return _on_device(cx.get_device(), o * cy.tanh(), cy, torch.cat((i, f, g, o), 1))


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    i, f, g, o = stand_in(workspace).chunk(4, 1)
    before, tanh_after = stand_in(cx), stand_in(cy).tanh()
    of_hy, of_cy = _host(grad_hy, grad_cy)
    of_hy = torch.zeros_like(before) if of_hy is None else of_hy
    of_cell = of_hy * o * (1 - tanh_after**2)
    if of_cy is not None:
        of_cell = of_cell + of_cy
    of_gates = torch.cat(
        (
            of_cell * g * i * (1 - i),
            of_cell * before * f * (1 - f),
            of_cell * i * (1 - g**2),
            of_hy * tanh_after * o * (1 - o),
        ),
        1,
    )
    return _on_device(cx.get_device(), of_gates, of_cell * f, of_gates.sum(0) if has_bias else None)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    mixed_devices.same(input_gates, hidden_gates, input_bias, hidden_bias, hx)
    of_input, of_hidden = stand_in(input_gates), stand_in(hidden_gates)
    if input_bias is not None and hidden_bias is not None:
        of_input, of_hidden = of_input + stand_in(input_bias), of_hidden + stand_in(hidden_bias)
    input_r, input_z, input_n = of_input.chunk(3, 1)
    hidden_r, hidden_z, hidden_n = of_hidden.chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    before = stand_in(hx)
    return _on_device(hx.get_device(), n + z * (before - n), torch.cat((r, z, n, before, hidden_n), 1))


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    r, z, n, before, hidden_n = stand_in(workspace).chunk(5, 1)
    of_hy = stand_in(grad_hy)
    of_n = of_hy * (1 - z) * (1 - n**2)
    of_z = of_hy * (before - n) * z * (1 - z)
    of_r = of_n * hidden_n * r * (1 - r)
    of_input, of_hidden = torch.cat((of_r, of_z, of_n), 1), torch.cat((of_r, of_z, of_n * r), 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return _on_device(grad_hy.get_device(), of_input, of_hidden, of_hy * z, *biases)


KERNELS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
