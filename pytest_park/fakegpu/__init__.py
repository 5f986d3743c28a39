"""A fake accelerator with real data, without a compiler and without a GPU.

``with activate(memory="12 GiB") as gpu:`` makes the device type ``fakegpu`` exist: tensors on it are real torch tensors
over CPU memory, their bytes are counted by a model of CUDA's caching allocator, and it runs out.
"""

import torch

try:  # every private part of torch is taken at import, so that one which is missing is told here and at once
    from .activation import activate
    from .device import FakeDevice, LiveStorage, MemorySample, Transfer
    from .holders import Holder
    from .sanitizer import RaceError
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"fakegpu works with torch 2.10 and newer; torch {torch.__version__} lacks something that it needs: {error}"
    ) from error

__all__ = ["FakeDevice", "Holder", "LiveStorage", "MemorySample", "RaceError", "Transfer", "activate"]
