"""Reading and writing the weights of a component wherever they are: on the device, parked, or released."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from park_core.errors import ParkError
from park_core.parking import moving

__all__ = ["iter_materialized_weights", "update_cpu_weights"]


def iter_materialized_weights(component: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name with its real values: on the device if it is there, else the host copy itself."""
    for name, weight in component.named_parameters(remove_duplicate=False):
        yield name, weight.detach()


def update_cpu_weights(component: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write new values into weights, in place, where they are. Nothing is written unless all of it fits.

    Args:
        component: the module that owns the weights.
        weights: new values by parameter name; another dtype or device is converted.

    Raises:
        ParkError: a name that the component does not have, a value of another shape, or a plain tensor for a weight
            that wraps others.
    """
    with moving, torch.no_grad():
        targets = dict(component.named_parameters(remove_duplicate=False))
        for name, value in weights.items():
            if name not in targets:
                raise ParkError(f"{type(component).__name__} has no weight {name!r}; nothing was updated")
            if value.shape != targets[name].shape:
                shapes = f"{tuple(value.shape)}, the weight has {tuple(targets[name].shape)}"
                raise ParkError(f"the new value of {name!r} has shape {shapes}; nothing was updated")
            if hasattr(targets[name], "__tensor_flatten__") and type(value) is not type(targets[name]):
                kind = type(targets[name]).__name__
                raise ParkError(f"{name!r} is a {kind}, and takes only another one as value; nothing was updated")
        for name, value in weights.items():
            targets[name].copy_(value)
