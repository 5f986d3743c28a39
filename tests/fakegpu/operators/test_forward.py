"""Every operator gives on the device what it gives on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .comparison import same_outcome
from .database import OPERATORS, parameters, samples
from .exceptions import HOST_ARGUMENTS, ROUNDING, UNINITIALISED

OTHERS = (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)

pytestmark = [pytest.mark.fake_device(memory="1 GiB"), pytest.mark.usefixtures("fake_device")]


def _same(op: Any, dtype: torch.dtype) -> None:
    half = dtype in (torch.bfloat16, torch.float16)
    atol, rtol = ROUNDING.get(op.name, (None, None)) if half else (None, None)
    for sample in samples(op, dtype):
        expected, _ = same_outcome(
            op.op,
            (sample.input, *sample.args),
            sample.kwargs,
            move_all=op.name not in HOST_ARGUMENTS,
            values=op.name not in UNINITIALISED,
            atol=atol,
            rtol=rtol,
        )
        if expected.error is not None:
            raise expected.error  # the samples are valid arguments


@pytest.mark.parametrize("op", parameters("float32", OPERATORS, lambda op: torch.float32 in op.supported_dtypes("cpu")))
def test_float32_equals_the_cpu(op: Any) -> None:
    _same(op, torch.float32)


@pytest.mark.parametrize("op", parameters("dtypes", OPERATORS, lambda op: op.supported_dtypes("cpu") & set(OTHERS)))
def test_other_dtypes_equal_the_cpu(op: Any) -> None:
    for dtype in OTHERS:
        if dtype in op.supported_dtypes("cpu"):
            _same(op, dtype)
