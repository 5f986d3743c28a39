"""Recurrent layers equal the CPU's, forward and backward, with all their options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pytest_park.fakegpu import FakeDevice


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in flat(item)]


def assert_equal_to_the_cpu(layer: nn.Module, *inputs: Any) -> None:
    """Outputs, gradients of all inputs and parameters."""

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("fakegpu").requires_grad_(value.requires_grad)
        return tuple(there(item) for item in value)

    twin = copy.deepcopy(layer).to("fakegpu")
    device_inputs = [there(value) for value in inputs]
    expected, actual = flat(layer(*inputs)), flat(twin(*device_inputs))
    assert {tensor.device.type for tensor in actual} == {"fakegpu"}
    seeds = [torch.randn_like(tensor) for tensor in expected]
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.cpu(), wanted)
    leaves = [tensor for tensor in flat(inputs) if tensor.requires_grad] + list(layer.parameters())
    device_leaves = [tensor for tensor in flat(device_inputs) if tensor.requires_grad] + list(twin.parameters())
    wanted_gradients = torch.autograd.grad(expected, leaves, seeds)
    gradients = torch.autograd.grad(actual, device_leaves, [seed.to("fakegpu") for seed in seeds])
    for got, wanted in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(got.cpu(), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_layers": 2, "bidirectional": True},
        {"batch_first": True},
    ],
    ids=["plain", "no bias", "two layers both ways", "batch first"],
)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_layers_equal_those_of_the_cpu(fake_device: FakeDevice, kind: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert_equal_to_the_cpu(kind(4, 5, **options), torch.randn(3, 2, 4, requires_grad=True))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_a_given_state_and_one_sequence_without_batch(fake_device: FakeDevice, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    state: Any = torch.randn(1, 5, requires_grad=True)
    if kind is nn.LSTM:
        state = (state, torch.randn(1, 5, requires_grad=True))
    assert_equal_to_the_cpu(kind(4, 5), torch.randn(3, 4, requires_grad=True), state)


def test_an_lstm_with_projections(fake_device: FakeDevice) -> None:
    torch.manual_seed(0)
    assert_equal_to_the_cpu(nn.LSTM(4, 5, proj_size=3), torch.randn(3, 2, 4, requires_grad=True))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell], ids=lambda kind: kind.__name__)
def test_cells_equal_those_of_the_cpu(fake_device: FakeDevice, kind: type[nn.Module], bias: bool) -> None:
    torch.manual_seed(0)
    state: Any = torch.randn(2, 5, requires_grad=True)
    if kind is nn.LSTMCell:
        state = (state, torch.randn(2, 5, requires_grad=True))
    assert_equal_to_the_cpu(kind(4, 5, bias=bias), torch.randn(2, 4, requires_grad=True), state)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_sequences_of_different_lengths(fake_device: FakeDevice, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = kind(4, 5, bidirectional=True)
    input, lengths = torch.randn(6, 3, 4), torch.tensor([6, 4, 1])
    expected, _ = pad_packed_sequence(layer(pack_padded_sequence(input, lengths))[0])
    layer.to("fakegpu")
    packed = pack_padded_sequence(input.to("fakegpu"), lengths)
    actual, actual_lengths = pad_packed_sequence(layer(packed)[0])
    torch.testing.assert_close(actual.cpu(), expected)
    assert actual_lengths.tolist() == [6, 4, 1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_half_precision(fake_device: FakeDevice, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer, input = kind(4, 5).bfloat16(), torch.randn(3, 2, 4).bfloat16()
    expected = layer(input)[0]
    actual = layer.to("fakegpu")(input.to("fakegpu"))[0]
    torch.testing.assert_close(actual.cpu(), expected, atol=0.02, rtol=0.02)


def test_nothing_is_left_on_the_device(fake_device: FakeDevice) -> None:
    layer = nn.LSTM(4, 5).to(fake_device.device)
    before = fake_device.requested
    output = layer(torch.randn(3, 2, 4, device=fake_device.device))[0]
    output.sum().backward()
    del output
    layer.zero_grad()
    assert fake_device.requested == before
