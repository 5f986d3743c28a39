"""The hooks that a project can implement in its ``conftest.py`` to change what the plugin does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch


@pytest.hookspec(firstresult=True)
def pytest_park_device(config: pytest.Config) -> torch.device | str | None:
    """The real accelerator that tests get as ``park_device`` under ``--real-gpu``.

    Return a ``torch.device`` or its name (``"cuda:1"``, ``"npu"``) to choose it, or None to leave the choice to the
    next implementation. The plugin's own comes last: it takes the first of CUDA or ROCm, XPU and MPS that torch can
    use. It is asked once in each process, before collection, and only under ``--real-gpu``.
    """


@pytest.hookspec
def pytest_park_machine_info(config: pytest.Config, info: dict[str, Any]) -> None:
    """Add to ``info`` what a benchmark's numbers depend on and pytest-benchmark does not know.

    It is kept under ``machine_info["park"]`` in saved benchmarks, which are compared by it: no value that changes from
    run to run belongs there. The plugin adds the name and memory of the device and the version of torch.
    """
