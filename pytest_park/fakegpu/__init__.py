"""A fake accelerator with real data, without a compiler and without a GPU.

``with activate(memory="12 GiB") as gpu:`` makes the device type ``fakegpu`` exist: tensors on it are real torch tensors
over CPU memory, their bytes are counted by a model of CUDA's caching allocator, and it runs out.
"""

from .activation import activate
from .device import FakeDevice, LiveStorage, MemorySample, Transfer
from .holders import Holder
from .sanitizer import RaceError

__all__ = ["FakeDevice", "Holder", "LiveStorage", "MemorySample", "RaceError", "Transfer", "activate"]
