"""Every module of ``torch.nn`` does on the device what it does on the CPU: outputs, gradients and buffers."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from .comparison import DEVICE, assert_same, on_device, outcome, tensors
from .database import MODULES, SAMPLES, parameters

pytestmark = [pytest.mark.fake_device(memory="1 GiB"), pytest.mark.usefixtures("fake_device")]


def _constructed(info: Any, sample: Any) -> tuple[nn.Module, nn.Module]:
    """The module on the CPU and its twin on the device."""
    given = sample.constructor_input
    torch.manual_seed(0)
    host = info.module_cls(*given.args, **given.kwargs).to(torch.float32)
    return host, copy.deepcopy(host).to(DEVICE)


def _run(module: nn.Module, sample: Any, arguments: Any) -> Any:
    args, kwargs = arguments
    return outcome(module, *args, **kwargs)


@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:Lazy modules are a new feature"
)  # torch's own
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("info", parameters("module", MODULES, lambda info: torch.float32 in info.dtypes))
def test_a_module_equals_itself_on_the_cpu(info: Any, training: bool) -> None:
    torch.manual_seed(0)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    for sample in islice(made, SAMPLES):
        if sample.forward_input is None:
            continue
        host, device = (module.train(training) for module in _constructed(info, sample))
        arguments = (sample.forward_input.args, sample.forward_input.kwargs)
        device_arguments = on_device(arguments)
        expected, actual = _run(host, sample, arguments), _run(device, sample, device_arguments)
        if expected.error is not None:
            raise expected.error
        if actual.error is not None:
            raise actual.error
        assert_same(actual.result, expected.result)
        assert_same(dict(device.named_buffers()), dict(host.named_buffers()))
        roots = [tensor for tensor in tensors(expected.result) if tensor.requires_grad]
        device_roots = [tensor for tensor in tensors(actual.result) if tensor.requires_grad]
        if not roots:
            continue
        seeds = [torch.randn_like(root) for root in roots]
        torch.autograd.backward(roots, seeds)
        torch.autograd.backward(device_roots, on_device(seeds))
        given, twins = [*tensors(arguments), *host.parameters()], [*tensors(device_arguments), *device.parameters()]
        leaves = [(twin, leaf) for twin, leaf in zip(twins, given, strict=True) if twin.is_leaf and leaf.is_leaf]
        assert_same([twin.grad for twin, _ in leaves], [leaf.grad for _, leaf in leaves])


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm,
                                  nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal],
                         ids=["weight_norm", "parametrized weight_norm", "spectral_norm", "orthogonal"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")  # and still used
@pytest.mark.parametrize("layer", [nn.Linear(4, 6), nn.Conv1d(4, 6, 3)], ids=["linear", "conv"])
def test_a_reparametrised_module_equals_itself_on_the_cpu(norm: Any, layer: nn.Module) -> None:
    torch.manual_seed(0)
    host = norm(copy.deepcopy(layer)).eval()
    device = norm(copy.deepcopy(layer)).eval()
    device.load_state_dict(host.state_dict())
    device.to(DEVICE)
    input = torch.randn(2, 4, 4)
    expected, actual = host(input), device(input.to(DEVICE))
    torch.testing.assert_close(actual.cpu(), expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    for (name, wanted), (_, got) in zip(host.named_parameters(), device.named_parameters(), strict=True):
        assert got.grad is not None, name
        assert got.grad.device.type == DEVICE
        torch.testing.assert_close(got.grad.cpu(), wanted.grad)
