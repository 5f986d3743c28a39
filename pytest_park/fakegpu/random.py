"""Random numbers of a fake device: a CPU generator of its own does the work."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from . import active
from .by_device import ByDevice, named_device


class Generator(torch._C.Generator):
    """``torch.Generator`` of a fake device: a CPU generator by birth (torch makes no other in Python), which says that
    it belongs to the device. Kernels can use it as it is, because they run on the CPU."""

    def __new__(cls, device: Any = None) -> Generator:
        made: Generator = super().__new__(cls, device="cpu")  # type: ignore[call-arg]
        made._device = torch.device("fakegpu", active.index_of(named_device(device)))
        _of_devices[_address(made)] = made
        return made

    def __init__(self, device: Any = None) -> None:
        pass

    _device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def clone_state(self) -> Generator:
        twin = Generator(self._device)
        twin.set_state(self.get_state())
        return twin


#: By the address of the C++ object, because kernels are handed another Python object for it.
_of_devices: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()


def _address(generator: torch._C.Generator) -> int:
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def is_of_a_device(generator: torch._C.Generator | None) -> bool:
    """Whether *generator* was made for a fake device; seen from a kernel, it looks like one of the CPU."""
    return generator is not None and _address(generator) in _of_devices


class AnyGenerator(metaclass=ByDevice, native=torch._C.Generator, fake=Generator, unnamed=torch._C.Generator):
    """``torch.Generator`` while a fake device is active."""
