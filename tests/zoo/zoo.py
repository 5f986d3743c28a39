"""Every class of the zoo: how to build it, and what its forward is given."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from . import from_diffusers, from_transformers

_HOMES: dict[str, Any] = {name: home for home in (from_transformers, from_diffusers) for name in home.ROWS}
NAMES = list(_HOMES)


def build(name: str) -> nn.Module:
    """A new module of this class on the host; its weights are random and every time the same."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # the libraries call functions of torch that are deprecated
        return _HOMES[name].build(name).eval()  # type: ignore[no-any-return]


def inputs(name: str, module: nn.Module, device: torch.device) -> dict[str, Any]:
    """Arguments of a forward of *module*, which is of this class."""
    given = _HOMES[name].inputs(name, module)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), given)  # type: ignore[no-any-return]
