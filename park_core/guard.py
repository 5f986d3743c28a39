"""Refusing to run a module whose weights are parked, before its forward starts.

A parked weight refuses to compute by itself (see ``parked_tensor``). The guard comes earlier: it also stops kernels
that take a tensor without asking torch, and work that would be thrown away. It sits on every submodule that owns a
parked weight, parametrizations included, runs before the other pre-forward hooks, and is gone while the
weights are resident.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import nn

from park_core.errors import WeightsParkedError
from park_core.parked_tensor import ParkedTensor, remedy
from park_core.wrappers import inner_tensors

__all__ = ["refresh_guards"]


def refresh_guards(component: nn.Module) -> None:
    """Put the guard on the submodules that need it now, and take it off the others."""
    for module in component.modules():
        if _parked_weight(module) is None:
            _take_off(module)
        elif _refuse_to_run not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_refuse_to_run, prepend=True)


def _take_off(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _refuse_to_run]:
        del module._forward_pre_hooks[key]


def _parked_weight(module: nn.Module) -> ParkedTensor | None:
    """A parked weight that ``module`` itself owns. Streamed layers are not meant: their manager loads them in time."""
    for owned in chain(module._parameters.values(), module._buffers.values()):
        parts = [owned] if type(owned) is nn.Parameter or owned is None else [t for _, t in inner_tensors("", owned)]
        for tensor in parts:
            if isinstance(tensor, ParkedTensor) and not tensor._parked.group.streamed:
                return tensor
    return None


def _refuse_to_run(module: nn.Module, _inputs: Any) -> None:
    weight = _parked_weight(module)
    if weight is None:  # a copy of a parked module, or no longer part of the component
        _take_off(module)
        return
    group, view, _ = weight._parked
    operation = f"{type(module).__name__}.forward"
    raise WeightsParkedError(group.component, view.name, operation=operation, remedy=remedy(group))
