"""Lists of layers: where a component has them, and which layers stay on the device during a use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from torch import nn

from park_core.config import OffloadConfig
from park_core.errors import LayerNameError

__all__ = ["check_layer_names", "find_layers", "layer_count", "outermost_lists", "resident_layers"]


def find_layers(component: nn.Module, name: str) -> list[nn.Module]:
    """The layers that a dotted name leads to.

    Raises:
        LayerNameError: no such submodule, or not a list of modules; the message says which names would do.
    """
    lists = (nn.ModuleList, nn.Sequential)
    known = [path for path, module in component.named_modules() if path and isinstance(module, lists) and len(module)]
    try:
        found = component.get_submodule(name)
    except AttributeError:
        found = None
    if isinstance(found, lists) and len(found) and name:
        return list(found)
    wrong = "does not exist" if found is None else f"is a {type(found).__name__}, not a list of layers"
    raise LayerNameError(
        f"layer name {name!r} {wrong} in {type(component).__name__}; lists of layers there: {known or 'none'}"
    )


def check_layer_names(component: nn.Module, names: Sequence[str]) -> None:
    """Raise ``LayerNameError`` if a name does not lead to layers, or the layers of two names overlap."""
    for (name, layers), (other, others) in combinations([(name, find_layers(component, name)) for name in names], 2):
        if _inside(layers) & {*others} or _inside(others) & {*layers}:
            raise LayerNameError(f"layer names {name!r} and {other!r} lead to the same layers; leave one of them out")


def _inside(layers: list[nn.Module]) -> set[nn.Module]:
    return {module for layer in layers for module in layer.modules()}


def outermost_lists(module: nn.Module) -> list[str]:
    """Lists of at least two layers of one class, none inside another."""
    found: list[str] = []
    for path, child in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in found) or not isinstance(child, nn.ModuleList):
            continue
        if len(child) > 1 and len({type(layer) for layer in child}) == 1 and any(True for _ in child.parameters()):
            found.append(path)
    return found


def resident_layers(config: OffloadConfig, layers: int) -> frozenset[int]:
    """The indices of the layers that stay, out of so many."""
    count = layer_count(config.resident_layers, layers)
    if config.residency_policy == "leading":
        return frozenset(range(count))
    return frozenset(index * layers // count for index in range(count))


def layer_count(setting: int | float, layers: int) -> int:
    """A count or a fraction as a number of layers: an int is a count, a float a fraction, rounded down."""
    return min(layers, setting if isinstance(setting, int) else int(setting * layers))
