"""torch's own warnings, which are errors in this repository, in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..warnings_of_others import allow

#: How the warning begins, and why it is not ours.
TORCHS_OWN = {
    "LSTM with projections is not supported with oneDNN": "the CPU says so of its own kernel, which the device borrows",
    "torch.qr is deprecated": "torch's own gradient of a pseudo-inverse uses it",
    "`torch.jit.script": "torch compiles its forward-mode derivatives on first use",
    "Sparse CSR tensor support is in beta": "said of any such tensor on the CPU",
    "ComplexHalf support is experimental": "said of any tensor of that dtype",
    "The argument 'device' of Tensor.pin_memory": "storages and data loaders of torch 2.10 pass it",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow(TORCHS_OWN, items, below=Path(__file__).parent)
