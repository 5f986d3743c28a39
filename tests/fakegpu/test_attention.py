"""Fused attention equals the CPU's, and takes no more memory than a GPU's flash kernel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_park.fakegpu import FakeDevice

_HEADS, _LENGTH, _WIDTH = 2, 512, 16


def inputs(
    length: int = _LENGTH, keys: int | None = None, heads: int = _HEADS, dtype: torch.dtype = torch.float32
) -> Any:
    torch.manual_seed(0)
    shapes = (heads, length), (heads, keys or length), (heads, keys or length)
    return [torch.randn(1, *shape, _WIDTH).to(dtype) for shape in shapes]


def on_device(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("fakegpu").requires_grad_(tensor.requires_grad) for tensor in tensors]


def assert_peak_is_that_of_a_flash_kernel(fake_device: FakeDevice, before: int, output: Tensor) -> None:
    logsumexp = 4 * output.shape[1] * output.shape[2]
    wanted = output.nbytes + logsumexp
    assert wanted <= fake_device.peak_allocated - before <= 1.1 * wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scaled"])
def test_the_peak_is_output_and_logsumexp(fake_device: FakeDevice, how: dict[str, Any], dtype: torch.dtype) -> None:
    query, key, value = on_device(inputs(dtype=dtype))
    before = fake_device.allocated
    fake_device.reset_peak()
    output = F.scaled_dot_product_attention(query, key, value, **how)
    assert_peak_is_that_of_a_flash_kernel(fake_device, before, output)
    torch.testing.assert_close(output.cpu(), F.scaled_dot_product_attention(*inputs(dtype=dtype), **how))


def test_the_peak_grows_with_the_length_and_not_with_its_square(fake_device: FakeDevice) -> None:
    peaks = []
    for length in (256, 1024):
        query, key, value = on_device(inputs(length))
        before = fake_device.allocated
        fake_device.reset_peak()
        F.scaled_dot_product_attention(query, key, value)
        peaks.append(fake_device.peak_allocated - before)
    assert peaks[1] <= 4.1 * peaks[0]


def test_training_takes_the_fused_path_too(fake_device: FakeDevice) -> None:
    query, key, value = on_device([tensor.requires_grad_() for tensor in inputs()])
    before = fake_device.allocated
    fake_device.reset_peak()
    output = F.scaled_dot_product_attention(query, key, value)
    assert_peak_is_that_of_a_flash_kernel(fake_device, before, output)
    assert fake_device.allocated - before < 1.1 * output.nbytes + 4 * _HEADS * _LENGTH


_MASKS = {
    "none": None,
    "bool": lambda q, k: (torch.arange(q)[:, None] + torch.arange(k)) % 3 != 1,
    "float": lambda q, k: torch.linspace(-2, 2, q * k).view(q, k),
    "per head": lambda q, k: torch.linspace(-2, 2, _HEADS * q * k).view(1, _HEADS, q, k),
}


@pytest.mark.parametrize("mask", list(_MASKS))
@pytest.mark.parametrize(("length", "keys"), [(64, 64), (33, 70), (1, 5)], ids=str)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_values_and_gradients_equal_those_of_the_cpu(
    fake_device: FakeDevice, mask: str, length: int, keys: int, batched: bool
) -> None:
    make = _MASKS[mask]
    attn_mask = None if make is None else make(length, keys)
    given = inputs(length, keys)
    if not batched:
        given = [tensor[0] for tensor in given]
        attn_mask = attn_mask[0] if mask == "per head" else attn_mask
    given = [tensor.requires_grad_() for tensor in given]
    there = on_device(given)
    expected = F.scaled_dot_product_attention(*given, attn_mask=attn_mask)
    actual = F.scaled_dot_product_attention(*there, attn_mask=None if attn_mask is None else attn_mask.to("fakegpu"))
    torch.testing.assert_close(actual.cpu(), expected)
    seed = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(actual, there, seed.to("fakegpu")), torch.autograd.grad(expected, given, seed), strict=True
    ):
        assert got.device == fake_device.device
        torch.testing.assert_close(got.cpu(), wanted)


@pytest.mark.parametrize(("causal", "gqa"), list(itertools.product((False, True), repeat=2)), ids=str)
def test_causal_and_grouped_queries_equal_those_of_the_cpu(fake_device: FakeDevice, causal: bool, gqa: bool) -> None:
    query, key, value = inputs(40, heads=4)
    if gqa:
        key, value = key[:, :2].contiguous(), value[:, :2].contiguous()
    given = [tensor.requires_grad_() for tensor in (query, key, value)]
    there = on_device(given)
    how = {"is_causal": causal, "enable_gqa": gqa}
    expected = F.scaled_dot_product_attention(*given, **how)
    actual = F.scaled_dot_product_attention(*there, **how)
    torch.testing.assert_close(actual.cpu(), expected)
    for got, wanted in zip(
        torch.autograd.grad(actual.sum(), there), torch.autograd.grad(expected.sum(), given), strict=True
    ):
        torch.testing.assert_close(got.cpu(), wanted)


def test_a_mask_that_is_learned_has_a_gradient(fake_device: FakeDevice) -> None:
    given = [*inputs(8), torch.zeros(8, 8)]
    for tensor in given:
        tensor.requires_grad_()
    there = on_device(given)
    expected = F.scaled_dot_product_attention(*given[:3], attn_mask=given[3])
    actual = F.scaled_dot_product_attention(*there[:3], attn_mask=there[3])
    torch.testing.assert_close(actual.cpu(), expected)
    (gradient,) = torch.autograd.grad(actual.square().sum(), there[3:])
    torch.testing.assert_close(gradient.cpu(), torch.autograd.grad(expected.square().sum(), given[3:])[0])


def test_dropout_drops(fake_device: FakeDevice) -> None:
    query, key, value = on_device(inputs(64))
    torch.manual_seed(0)
    dropped = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(F.scaled_dot_product_attention(query, key, value, dropout_p=0.5), dropped)
    assert not torch.allclose(F.scaled_dot_product_attention(query, key, value), dropped)


def test_the_plain_formula_can_be_asked_for(fake_device: FakeDevice) -> None:
    query, key, value = on_device(inputs())
    fused = F.scaled_dot_product_attention(query, key, value)
    before = fake_device.allocated
    fake_device.reset_peak()
    with sdpa_kernel(SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(query, key, value)
    assert fake_device.peak_allocated - before > 4 * _HEADS * _LENGTH * _LENGTH
    torch.testing.assert_close(plain, fused)


def test_multi_head_attention_equals_the_cpu(fake_device: FakeDevice) -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    input = torch.randn(2, 7, 16)
    for need_weights in (True, False):
        for training in (True, False):
            layer.to("cpu").train(training)
            expected, weights = layer(input, input, input, need_weights=need_weights)
            layer.to("fakegpu")
            there = input.to("fakegpu")
            actual, device_weights = layer(there, there, there, need_weights=need_weights)
            torch.testing.assert_close(actual.cpu(), expected)
            assert (device_weights is None) == (weights is None)
            if weights is not None:
                torch.testing.assert_close(device_weights.cpu(), weights)


def test_a_shape_that_does_not_fit_is_refused(fake_device: FakeDevice) -> None:
    query, key, value = inputs(8)
    for given in (
        (query, key[:, :1].expand(1, 3, 8, 16), value),
        (query, key, value[:, :, :4]),
        (query, key[0, 0, 0], value),
    ):
        with pytest.raises((RuntimeError, IndexError)):  # the formula; the CPU's flash kernel itself does not look
            torch.ops.aten._scaled_dot_product_attention_math(*given)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*on_device(list(given)))
