"""``tensor.data = value`` is accepted wherever dense back ends accept it, and keeps what they keep."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pytest_park.fakegpu import FakeDevice


@pytest.mark.parametrize("there", [True, False], ids=["to the device", "to the host"])
def test_assignment_between_devices_keeps_the_object(fake_device: FakeDevice, there: bool) -> None:
    devices = [torch.device("cpu"), fake_device.device]
    source, target = devices if there else devices[::-1]
    parameter = nn.Parameter(torch.arange(3.0, device=source))
    parameter.note = "kept"  # type: ignore[attr-defined]
    reference, identity = weakref.ref(parameter), id(parameter)
    parameter.data = torch.tensor([5.0, 6.0], device=target)
    assert parameter.device == target
    assert parameter.tolist() == [5, 6]
    assert id(parameter) == identity
    assert reference() is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert not parameter._is_view()
    assert isinstance(parameter, nn.Parameter)
    assert parameter.note == "kept"  # type: ignore[attr-defined]


def test_the_value_is_shared_and_not_copied(fake_device: FakeDevice) -> None:
    parameter, value = nn.Parameter(torch.ones(3)), torch.zeros(3, device=fake_device.device)
    before = fake_device.allocations
    parameter.data = value
    assert fake_device.allocations == before
    value.fill_(4)
    assert parameter.tolist() == [4, 4, 4]
    assert parameter.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


def test_a_later_assignment_frees_the_bytes_of_the_first(fake_device: FakeDevice) -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.data = parameter.data.to(fake_device.device)
    assert fake_device.requested == 4000
    parameter.data = torch.empty(0, device=fake_device.device)
    assert fake_device.requested == 0
    parameter.data = torch.ones(1000, device=fake_device.device)
    parameter.data = torch.ones(2)
    assert fake_device.requested == 0


def test_the_parameter_works_after_the_assignment(fake_device: FakeDevice) -> None:
    layer = nn.Linear(3, 2)
    input = torch.randn(4, 3)
    expected = layer(input)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(fake_device.device)
    output = layer(input.to(fake_device.device))
    torch.testing.assert_close(output.cpu(), expected)
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == fake_device.device
    torch.testing.assert_close(layer.weight.grad.cpu(), input.sum(0).expand(2, 3))


def test_gradient_hooks_survive_the_assignment(fake_device: FakeDevice) -> None:
    parameter = nn.Parameter(torch.ones(3))
    seen: list[str] = []
    parameter.register_hook(lambda gradient: seen.append(gradient.device.type))
    parameter.grad = torch.full((3,), 2.0)
    parameter.data = torch.ones(3, device=fake_device.device)
    (parameter * 3).sum().backward()
    assert seen == ["fakegpu"]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [5, 5, 5]


def test_a_module_moves_there_and_back_with_its_gradients(fake_device: FakeDevice) -> None:
    layer = nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    parameters = [id(parameter) for parameter in layer.parameters()]
    gradient = layer.weight.grad.clone()  # type: ignore[union-attr]
    layer.to(fake_device.device)
    assert layer.weight.device.type == layer.weight.grad.device.type == "fakegpu"  # type: ignore[union-attr]
    layer.to("cpu")
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, gradient)
    assert [id(parameter) for parameter in layer.parameters()] == parameters
    assert fake_device.allocated == 0


@pytest.mark.parametrize("of_parameter", [True, False], ids=["inference parameter", "normal parameter"])
@pytest.mark.parametrize("of_value", [True, False], ids=["inference value", "normal value"])
@pytest.mark.parametrize("source", ["cpu", "fakegpu"])
def test_inference_and_normal_tensors_may_be_assigned_to_each_other(
    fake_device: FakeDevice, of_parameter: bool, of_value: bool, source: str
) -> None:
    with torch.inference_mode(of_parameter):
        parameter = nn.Parameter(torch.ones(3, device=source), requires_grad=False)
    with torch.inference_mode(of_value):
        value = torch.zeros(3, device=fake_device.device)
    parameter.data = value
    assert parameter.tolist() == [0, 0, 0]
    assert parameter.device == fake_device.device
    with torch.inference_mode():
        assert (parameter + 1).tolist() == [1, 1, 1]


def test_a_wrapper_subclass_may_be_assigned(fake_device: FakeDevice) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def two(value: float, device: Any = fake_device.device) -> TwoTensor:
        return TwoTensor(torch.full((3,), value, device=device), torch.full((3,), -value, device=device))

    weight = two(1.0)
    assert weight.device == fake_device.device
    weight.data = two(2.0)
    moved = weight.to("cpu")
    assert moved.a.device.type == moved.b.device.type == "cpu"
    back = moved.to(fake_device.device)
    assert (back.a.tolist(), back.b.tolist()) == (moved.a.tolist(), moved.b.tolist())
    assert (back.a + back.b).tolist() == [0, 0, 0]


def test_what_torch_refuses_is_refused(fake_device: FakeDevice) -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="floating point"):
        parameter.data = torch.ones(3, dtype=torch.int64, device=fake_device.device)
    with pytest.raises(TypeError):
        parameter.data = [1.0, 2.0]  # type: ignore[assignment]
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.device.type == "cpu"


def test_assignment_on_the_host_is_torchs_own(fake_device: FakeDevice) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.data = torch.zeros(2)
    assert parameter.tolist() == [0, 0]
    assert fake_device.allocations == 0
