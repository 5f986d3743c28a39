"""``out=`` and in-place variants write into the tensor that was given where the CPU's do, and raise where they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .comparison import outcome, same_outcome, tensors
from .database import OPERATORS, parameters, samples
from .exceptions import UNINITIALISED

pytestmark = [pytest.mark.fake_device(memory="1 GiB"), pytest.mark.usefixtures("fake_device")]


#: What a factory may not be told beside ``out=``.
_SAID_BY_OUT = {"device", "dtype", "layout", "requires_grad", "pin_memory"}

#: Their results come as a tuple and their ``out=`` is a list.
_LISTS = {"unbind_copy", "split_with_sizes_copy"}


def _as_it_comes(result: Tensor) -> Tensor:
    return torch.full_like(result, 7)


def _spread(result: Tensor) -> Tensor:
    """With a gap between any two elements."""
    spread = result.new_full((*result.shape, 2), 7)
    return spread[..., 0]


def _empty(result: Tensor) -> Tensor:
    """To be resized."""
    return result.new_empty(0)


def _too_large(result: Tensor) -> Tensor:
    """To be resized too, with a warning."""
    return result.new_full((*(size + 1 for size in result.shape), 1), 7)


@pytest.mark.parametrize("op", parameters("out", OPERATORS, lambda op: op.supports_out and op.dtypes))
def test_out_is_written(op: Any) -> None:
    dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else min(op.supported_dtypes("cpu"), key=str)
    written = 0
    for sample in samples(op, dtype):
        arguments = (sample.input, *sample.args)
        plain = outcome(op.op, *arguments, **sample.kwargs).result
        if not any(result.numel() for result in tensors(plain)):
            continue  # nothing would be written
        for made in (_as_it_comes, _spread, _empty, _too_large):
            out = tree_map_only(Tensor, lambda result, made=made: made(result.detach()), plain)
            out = list(out) if op.name in _LISTS else out
            kwargs = {name: value for name, value in sample.kwargs.items() if name not in _SAID_BY_OUT} | {"out": out}
            try:
                expected, actual = same_outcome(op.op, arguments, kwargs, values=op.name not in UNINITIALISED)
            except BaseException as error:
                error.add_note(f"out{made.__name__}, {sample}")
                raise
            if expected.error is None:
                written += len(tensors(actual.result))
    if not written:
        pytest.skip("the CPU takes no out= here either")


@pytest.mark.parametrize("op", parameters("in place", OPERATORS, lambda op: op.inplace_variant is not None))
def test_in_place_writes_the_tensor_itself(op: Any) -> None:
    dtype = torch.float32 if torch.float32 in op.supported_dtypes("cpu") else min(op.supported_dtypes("cpu"), key=str)
    written = 0
    for sample in samples(op, dtype):
        if isinstance(sample.input, list | tuple) or sample.broadcasts_input:
            continue  # what is written must have the shape of the result
        given = sample.input.clone()
        expected, actual = same_outcome(op.inplace_variant, (given, *sample.args), sample.kwargs)
        if expected.error is None:
            written += 1
            assert actual.result is not None
    if not written:
        pytest.skip("the CPU cannot write float32 in place here either")
