"""What a torch that is old enough to lack something cannot do on the fake device, for the tests that need it."""

from __future__ import annotations

import pytest
import torch

#: To resize a storage; the error that is expected otherwise names what is missing.
without_swap = pytest.mark.xfail(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
    reason="torch 2.10 and 2.11 cannot swap the memory of two storages",
    raises=NotImplementedError,
    strict=True,
)
