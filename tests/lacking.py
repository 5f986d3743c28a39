"""What a torch that is old enough to lack something cannot do, for the tests that need it."""

from __future__ import annotations

import pytest
import torch

#: For what resizes a storage that others see; the error that is expected otherwise names what is missing.
without_swap = pytest.mark.xfail(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
    reason="torch 2.10 and 2.11 cannot swap the memory of two storages",
    raises=NotImplementedError,
    strict=True,
)
