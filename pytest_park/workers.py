"""One GPU per xdist worker, so that the memory that one test measures is not taken by another.

The controller decides which GPU a worker sees and sends it along; the worker hides the others from itself before torch
looks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from pytest_park.selection import RealGpus

# Each back end has a variable of its own that hides devices from a process. ROCm applies CUDA_VISIBLE_DEVICES on top of
# what the HIP one leaves, so that setting both would hide too much.
_VISIBLE_DEVICES: Final = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES", "intel": "ZE_AFFINITY_MASK"}
_WORKER_INPUT: Final = "park_environment"


def check_worker_count(config: pytest.Config, gpus: RealGpus) -> None:
    """Refuse more workers than GPUs: two tests that measure one GPU's memory disturb each other."""
    workers = config.getoption("numprocesses", None)
    if isinstance(workers, int) and workers > gpus.count:
        there = "there is 1 GPU" if gpus.count == 1 else f"there are {gpus.count} GPUs"
        raise pytest.UsageError(
            f"--real-gpu gives each xdist worker a GPU of its own, and {there}: use -n {gpus.count} or -n auto, "
            f"not -n {workers}."
        )


def environment_of_worker(worker: int, gpus: RealGpus, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that leave only the ``worker``-th of the GPUs that ``environ`` shows to a process.

    Empty for a back end that has no such variable.
    """
    name = _VISIBLE_DEVICES.get(gpus.vendor or "")
    if name is None:
        return {}
    visible = [entry.strip() for entry in environ.get(name, "").split(",") if entry.strip()]
    return {name: visible[worker] if worker < len(visible) else str(worker)}


def send_gpu_to_worker(node: Any, gpus: RealGpus) -> None:
    """In the controller: tell the worker behind an xdist ``WorkerController`` which GPU is its own."""
    number = int(str(node.gateway.id).removeprefix("gw"))
    node.workerinput[_WORKER_INPUT] = environment_of_worker(number, gpus, os.environ)


def take_gpu_of_worker(config: pytest.Config) -> None:
    """In the worker: hide the other GPUs. It must run before torch initialises the device."""
    os.environ.update(getattr(config, "workerinput", {}).get(_WORKER_INPUT, {}))
