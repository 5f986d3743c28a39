"""What of torch's databases the fake device cannot do, with the reason. Each is expected to fail, strictly: one that
starts to pass must leave this list. ``pytest -ra`` prints them in its summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Exempt:
    """Why an entry cannot be had, and what its test fails with."""

    reason: str
    raises: type[BaseException] | tuple[type[BaseException], ...]

    def mark(self) -> Any:
        return pytest.mark.xfail(reason=self.reason, raises=self.raises, strict=True)


_CUDA_ONLY = Exempt("torch compiles such functions for CUDA and ROCm only", AssertionError)
_SPARSE = Exempt("there are no sparse tensors on the fake device", NotImplementedError)

#: By kind of test and name of the entry.
EXCEPTIONS: dict[tuple[str, str], Exempt] = {
    **{
        (kind, f"jiterator_{name}"): _CUDA_ONLY
        for kind in ("float32", "dtypes")
        for name in ("unary", "binary", "4inputs_with_extra_args", "binary_return_by_ref", "2inputs_2outputs")
    },
    **{
        (kind, name): _SPARSE
        for kind in ("float32", "dtypes", "backward")
        for name in ("to_sparse", "sparse_mm_reduce", "sparse_sampled_addmm")
    },
    ("error", "cat"): Exempt("an empty out= that is an argument too is resized instead of refused", AssertionError),
    ("out", "normal_number_mean"): Exempt("an out= that is too large is not made smaller for this one", RuntimeError),
}

if torch.__version__ < "2.11":  # its database asks a GPU which samples are valid
    EXCEPTIONS["out", "torch__scaled_mm_v2"] = Exempt(
        "torch 2.10 asks a GPU which samples are valid", (AssertionError, RuntimeError)
    )

#: Operators whose other arguments stay on the host, because torch takes them from there on every device.
HOST_ARGUMENTS = {"tensor_split"}

#: They make memory without writing it: there is no right value.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

#: Operators that add in another order on another device: (atol, rtol) in half precision.
ROUNDING = {"nn.functional.linear_cross_entropy": (4e-3, 4e-2)}
