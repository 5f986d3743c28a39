"""Lists of layers: where a component has them, and which layers stay on the device during a use."""

from __future__ import annotations

from torch import nn

from park_core.config import OffloadConfig, layer_count
from park_core.errors import LayerNameError

__all__ = ["find_layers", "outermost_lists", "resident_layers"]


def find_layers(component: nn.Module, name: str) -> list[nn.Module]:
    """The layers that a dotted name leads to.

    Raises:
        LayerNameError: no such submodule, or not a list of modules; the message says which names would do.
    """
    lists = (nn.ModuleList, nn.Sequential)
    known = [path for path, module in component.named_modules() if isinstance(module, lists) and len(module)]
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
