"""``torch.autocast("fakegpu")`` casts what it casts on CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_park.fakegpu import FakeDevice


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="fakegpu")


_LOWER: dict[str, Callable[[], torch.Tensor]] = {
    "linear": lambda: F.linear(tensor(2, 4), tensor(3, 4)),
    "matmul": lambda: tensor(2, 4) @ tensor(4, 2),
    "bmm": lambda: tensor(1, 2, 4).bmm(tensor(1, 4, 2)),
    "conv2d": lambda: F.conv2d(tensor(1, 1, 4, 4), tensor(1, 1, 2, 2)),
    "conv_transpose2d": lambda: F.conv_transpose2d(tensor(1, 1, 4, 4), tensor(1, 1, 2, 2)),
    "addmm": lambda: torch.addmm(tensor(2, 2), tensor(2, 4), tensor(4, 2)),
    "attention": lambda: F.scaled_dot_product_attention(tensor(1, 2, 4), tensor(1, 2, 4), tensor(1, 2, 4)),
    "prelu": lambda: F.prelu(tensor(2, 2), tensor(1)),
}
_FLOAT32: dict[str, Callable[[], torch.Tensor]] = {
    "softmax": lambda: tensor(2, 4, dtype=torch.bfloat16).softmax(-1),
    "layer_norm": lambda: F.layer_norm(tensor(2, 4, dtype=torch.bfloat16), (4,)),
    "exp": lambda: tensor(2, dtype=torch.float16).exp(),
    "sum": lambda: tensor(2, dtype=torch.float16).sum(),
    "mse_loss": lambda: F.mse_loss(tensor(2, dtype=torch.bfloat16), tensor(2, dtype=torch.bfloat16)),
    "pow": lambda: tensor(2, dtype=torch.bfloat16) ** 2,
    "cumsum": lambda: tensor(2, dtype=torch.bfloat16).cumsum(0),
    "norm": lambda: tensor(2, dtype=torch.bfloat16).norm(2),
    "interpolate": lambda: F.interpolate(tensor(1, 1, 2, 2, dtype=torch.bfloat16), scale_factor=2, mode="bilinear"),
}
_WIDEST: dict[str, Callable[[], torch.Tensor]] = {
    "cat": lambda: torch.cat([tensor(2, dtype=torch.bfloat16), tensor(2)]),
    "stack": lambda: torch.stack([tensor(2, dtype=torch.bfloat16), tensor(2)]),
    "addcmul": lambda: torch.addcmul(tensor(2), tensor(2, dtype=torch.bfloat16), tensor(2)),
}
_UNTOUCHED: dict[str, Callable[[], torch.Tensor]] = {
    "add": lambda: tensor(2, dtype=torch.bfloat16) + tensor(2, dtype=torch.bfloat16),
    "relu": lambda: tensor(2, dtype=torch.float16).relu(),
    "embedding": lambda: F.embedding(
        torch.zeros(1, dtype=torch.int64, device="fakegpu"), tensor(2, 2, dtype=torch.float16)
    ),
    "integer sum": lambda: torch.ones(2, dtype=torch.int64, device="fakegpu") * 2,
}


def each(calls: dict[str, Callable[[], torch.Tensor]]) -> Any:
    return pytest.mark.parametrize("call", list(calls.values()), ids=list(calls))


@each(_LOWER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_run_in_the_lower_dtype(
    fake_device: FakeDevice, call: Callable[[], torch.Tensor], dtype: torch.dtype
) -> None:
    plain = call()
    assert plain.dtype is torch.float32
    with torch.autocast("fakegpu", dtype=dtype):
        result = call()
    assert result.dtype is dtype
    torch.testing.assert_close(result.float(), plain, rtol=0.01, atol=0.01)
    assert call().dtype is torch.float32


@each(_FLOAT32)
def test_sums_and_exponentials_run_in_float32(fake_device: FakeDevice, call: Callable[[], torch.Tensor]) -> None:
    assert call().dtype is not torch.float32
    with torch.autocast("fakegpu", dtype=torch.bfloat16):
        assert call().dtype is torch.float32


@each(_WIDEST)
def test_mixtures_run_in_the_widest_dtype(fake_device: FakeDevice, call: Callable[[], torch.Tensor]) -> None:
    with torch.autocast("fakegpu", dtype=torch.bfloat16):
        assert call().dtype is torch.float32


@each(_UNTOUCHED)
def test_everything_else_is_left_alone(fake_device: FakeDevice, call: Callable[[], torch.Tensor]) -> None:
    plain = call()
    with torch.autocast("fakegpu", dtype=torch.bfloat16):
        assert call().dtype is plain.dtype


def _listed(macro: str) -> set[str]:
    """The operators that a list of torch's own header names."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", header)
    assert body is not None
    return {"aten::" + name.replace(", ", ".") for name in re.findall(r"_\((\w+(?:, \w+)?)\)", body[1])}


@pytest.mark.parametrize("macro", ["LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"])
def test_every_operator_that_cuda_casts_is_cast(fake_device: FakeDevice, macro: str) -> None:
    known = set(torch._C._dispatch_get_all_op_names())
    listed = _listed(f"AT_FORALL_{macro}") & known
    assert len(listed) > 8
    lacking = {
        name for name in listed if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastPrivateUse1")
    }
    assert lacking == set()


def test_what_is_unsafe_is_refused_as_on_cuda(fake_device: FakeDevice) -> None:
    half = tensor(2) / 2
    F.binary_cross_entropy(half, half)
    with torch.autocast("fakegpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(half, half)


def test_it_can_be_turned_off_inside(fake_device: FakeDevice) -> None:
    assert not torch.is_autocast_enabled("fakegpu")
    with torch.autocast("fakegpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("fakegpu")
        assert torch.get_autocast_dtype("fakegpu") is torch.bfloat16
        with torch.autocast("fakegpu", enabled=False):
            assert (tensor(2, 2) @ tensor(2, 2)).dtype is torch.float32
        assert (tensor(2, 2) @ tensor(2, 2)).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("fakegpu")


@pytest.mark.parametrize("grad", [False, True])
def test_a_weight_is_cast_once_and_kept_to_the_end(fake_device: FakeDevice, grad: bool) -> None:
    layer = nn.Linear(64, 64, bias=False).to(fake_device.device)
    given = tensor(1, 64)
    with torch.set_grad_enabled(grad):
        before, allocations = fake_device.requested, fake_device.allocations
        with torch.autocast("fakegpu"):
            layer(given)
            assert fake_device.requested == before + 64 * 64 * 2
            layer(given)
            assert fake_device.requested == before + 64 * 64 * 2
            assert fake_device.allocations == allocations + 5  # one weight; input and output, twice
        assert fake_device.requested == before
        with torch.autocast("fakegpu", cache_enabled=False):
            layer(given)
            assert fake_device.requested == before


def test_the_gradients_of_a_weight_add_up_in_the_lower_dtype(fake_device: FakeDevice) -> None:
    weight = nn.Parameter(tensor(1, 1))
    with torch.autocast("fakegpu", dtype=torch.bfloat16):
        (weight @ tensor(1, 1) + weight @ tensor(1, 1).mul(2**-9)).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 1  # and not 1 + 2**-9, which bfloat16 does not have


def test_float32_is_a_lower_dtype_too(fake_device: FakeDevice) -> None:
    half = tensor(2, 2, dtype=torch.float16)
    with torch.autocast("fakegpu", dtype=torch.float32):
        assert (half @ half).dtype is torch.float32


def test_the_host_is_not_affected(fake_device: FakeDevice) -> None:
    with torch.autocast("fakegpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_gradients_have_the_dtype_of_their_parameters(fake_device: FakeDevice) -> None:
    layer = nn.Linear(4, 4).to(fake_device.device)
    with torch.autocast("fakegpu", dtype=torch.bfloat16):
        loss = layer(tensor(2, 4)).float().sum()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32
    assert layer.weight.grad.tolist() == [[2] * 4] * 4


def test_the_device_module_has_its_own(fake_device: FakeDevice) -> None:
    with torch.fakegpu.amp.autocast():
        assert (tensor(2, 4) @ tensor(4, 2)).dtype is torch.float16
    with torch.fakegpu.amp.autocast(enabled=False):
        assert (tensor(2, 4) @ tensor(4, 2)).dtype is torch.float32
    assert torch.fakegpu.amp.GradScaler(enabled=False).scale(tensor(2)).tolist() == [1, 1]


@pytest.mark.parametrize("of_the_module", [False, True])
def test_a_gradient_scaler_scales_and_steps(fake_device: FakeDevice, of_the_module: bool) -> None:
    weight = nn.Parameter(tensor(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.fakegpu.amp.GradScaler(8.0) if of_the_module else torch.amp.GradScaler("fakegpu", init_scale=8.0)
    scaled = scaler.scale(weight.sum())
    assert scaled.tolist() == 16
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]
    optimizer.zero_grad()
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]  # a step with infinite gradients is skipped
    assert scaler.get_scale() == 4.0
