"""torch's own databases of its operators and modules, with samples of valid arguments, as pytest parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import hypothesis
import pytest
import torch

from .exceptions import EXCEPTIONS

#: Samples of each entry and dtype that are tried.
SAMPLES = 4


def _load() -> tuple[list[Any], list[Any]]:
    """Importing the databases changes settings of the whole process, for torch's own suite; they are put back."""
    profile = hypothesis.settings.default
    with torch.backends.__allow_nonbracketed_mutation(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    hypothesis.settings.register_profile("before torch's databases", profile)
    hypothesis.settings.load_profile("before torch's databases")
    torch.backends.__allow_nonbracketed_mutation_flag = True
    return op_db, module_db


OPERATORS, MODULES = _load()


def parameters(kind: str, entries: list[Any], wanted: Callable[[Any], bool]) -> list[Any]:
    """One pytest parameter for each of *entries* that is *wanted*; those that cannot be had are expected to fail.

    Expected strictly: an exception that passes is a failure, so that the list of exceptions stays true.
    """
    found = []
    for entry in entries:
        name = getattr(entry, "formatted_name", entry.name)
        if wanted(entry):
            exception = EXCEPTIONS.get((kind, name))
            marks = [exception.mark()] if exception else []
            found.append(pytest.param(entry, id=name, marks=marks))
    return found


def samples(op: Any, dtype: torch.dtype, *, requires_grad: bool = False) -> Iterator[Any]:
    """A few valid arguments of *op* on the CPU, the same at each run."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed also queues a call for CUDA, with a stack, each time
    return islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), SAMPLES)
