"""The ``real_gpu`` mark: what a test wants, what is there, and whether the two match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from pytest_park import marks
from pytest_park.options import is_count
from pytest_park.sizes import format_bytes

if TYPE_CHECKING:
    import torch

VENDORS: Final = ("nvidia", "amd", "intel", "apple")
NEEDS_REAL_GPU: Final = "needs a real GPU: run with --real-gpu"

_STASH_KEY: Final = pytest.StashKey["RealGpus"]()


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGpu:
    """What ``@pytest.mark.real_gpu(...)`` asks for. ``memory`` is in bytes and is that of the smallest device."""

    vendor: str | None = None
    count: int = 1
    memory: int | None = None

    @classmethod
    def from_mark(cls, mark: pytest.Mark, nodeid: str) -> WantedGpu:
        """Read a mark; one that makes no sense is a ``pytest.UsageError`` that names the test and what is valid."""
        given = marks.arguments(mark, nodeid, keyword=("vendor", "count", "memory"))
        vendor, count, memory = given.get("vendor"), given.get("count", 1), given.get("memory")
        if vendor is not None and vendor not in VENDORS:
            raise pytest.UsageError(
                f"{nodeid}: @pytest.mark.real_gpu: vendor={vendor!r} is not known: use one of {', '.join(VENDORS)}."
            )
        if not is_count(count):
            raise pytest.UsageError(
                f"{nodeid}: @pytest.mark.real_gpu: count={count!r} is not a number of devices: use 1 or more."
            )
        return cls(
            vendor=vendor,
            count=count,
            memory=None if memory is None else marks.size(mark.name, nodeid, memory),
        )

    def missing_in(self, gpus: RealGpus) -> str | None:
        """Why ``gpus`` are not what is wanted, as the reason of a skip; None if they are."""
        if self.vendor not in (None, gpus.vendor):
            return f"needs a GPU of vendor {self.vendor}, here it is {gpus.vendor or 'an unknown one'}"
        if self.count > gpus.count:
            return f"needs {self.count} GPUs, {gpus.count} can be seen"
        if self.memory is not None and self.memory > gpus.memory:
            return f"needs a GPU with {format_bytes(self.memory)}, here it has {format_bytes(gpus.memory)}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RealGpus:
    """The real accelerators that this process can use. ``memory`` is that of the chosen device, in bytes."""

    device: torch.device
    vendor: str | None
    name: str
    count: int
    memory: int


def first_real_device() -> torch.device | None:
    """The first accelerator that torch can use here, or None.

    ``torch.accelerator.current_accelerator()`` is not asked: once a fake device was registered it answers with that
    one, even beside a real GPU.
    """
    import torch

    for kind in ("cuda", "xpu", "mps"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, 0)
    return None


def find_real_gpus(config: pytest.Config) -> RealGpus:
    """What is there, asked of ``pytest_park_device`` once per process. No device is a ``pytest.UsageError``."""
    if _STASH_KEY in config.stash:
        return config.stash[_STASH_KEY]
    import torch

    chosen = config.hook.pytest_park_device(config=config)
    if chosen is None:
        raise pytest.UsageError(
            f"--real-gpu: torch {torch.__version__} finds no GPU here. Without --real-gpu the tests run on the fake "
            "device; if there is a GPU, check its driver and that this torch is built for it "
            "(torch.cuda.is_available())."
        )
    gpus = _describe(torch.device(chosen))
    config.stash[_STASH_KEY] = gpus
    return gpus


def skip_if_it_cannot_run(item: pytest.Item, *, real_gpu: bool) -> None:
    """Mark a ``real_gpu`` test that cannot run here as skipped, with the reason."""
    mark = item.get_closest_marker("real_gpu")
    if mark is None:
        return
    wanted = WantedGpu.from_mark(mark, item.nodeid)
    reason = wanted.missing_in(find_real_gpus(item.config)) if real_gpu else NEEDS_REAL_GPU
    if reason is not None:
        item.add_marker(pytest.mark.skip(reason=reason))  # and not pytest.skip(): a mark is told with the test's line


def _describe(device: torch.device) -> RealGpus:
    import torch

    module = torch.get_device_module(device.type)
    device = torch.device(device.type, device.index or 0)
    vendor = {"cuda": "amd" if torch.version.hip else "nvidia", "xpu": "intel", "mps": "apple"}.get(device.type)
    if device.type == "mps":
        name, memory = "Apple GPU", module.recommended_max_memory()
    else:
        properties = module.get_device_properties(device)
        name, memory = str(properties.name), int(properties.total_memory)
    return RealGpus(device=device, vendor=vendor, name=name, count=int(module.device_count()), memory=memory)
