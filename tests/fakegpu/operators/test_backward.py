"""Every differentiable operator has on the device the gradients that it has on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .comparison import assert_same, on_device, outcome, tensors
from .database import OPERATORS, parameters, samples
from .exceptions import HOST_ARGUMENTS

pytestmark = [pytest.mark.fake_device(memory="1 GiB"), pytest.mark.usefixtures("fake_device")]


def differentiable(op: Any) -> bool:
    return op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")


@pytest.mark.parametrize("op", parameters("backward", OPERATORS, differentiable))
def test_gradients_equal_those_of_the_cpu(op: Any) -> None:
    compared = 0
    for sample in samples(op, torch.float32, requires_grad=True):
        arguments = (sample.input, sample.args, sample.kwargs)

        def run(input: Any, args: Any, kwargs: Any, process: Any = sample.output_process_fn_grad) -> Any:
            return process(op.op(input, *args, **kwargs))

        device_arguments = on_device(arguments)
        if op.name in HOST_ARGUMENTS:
            device_arguments = (device_arguments[0], *arguments[1:])
        results = [outcome(run, *given) for given in (arguments, device_arguments)]
        for result in results:
            if result.error is not None:
                raise result.error
        roots = [tensor for tensor in tensors(results[0].result) if tensor.requires_grad]
        device_roots = [tensor for tensor in tensors(results[1].result) if tensor.requires_grad]
        assert len(roots) == len(device_roots)
        if not roots:
            continue
        seeds = [torch.randn_like(root) for root in roots]
        leaves, device_leaves = (
            [tensor for tensor in tensors(given) if tensor.requires_grad] for given in (arguments, device_arguments)
        )
        expected = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        actual = torch.autograd.grad(device_roots, device_leaves, on_device(seeds), allow_unused=True)
        assert [gradient is None for gradient in actual] == [gradient is None for gradient in expected]
        assert_same(actual, expected)
        compared += len(tensors(expected))
    assert compared, "no sample had a gradient"
