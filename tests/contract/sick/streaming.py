"""Streaming of layers, as small as it can be: each is on the device only while its forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Streamer:
    """Keeps the layers of the named lists on the host; a weight that something else owns too is not streamed."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.store: dict[int, torch.Tensor] = {}
        prefixes = tuple(f"{name}." for name in names)
        others = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if not name.startswith(prefixes)}
        for name in names:
            for layer in module.get_submodule(name).children():
                mine = [parameter for parameter in layer.parameters() if not prefixes or id(parameter) not in others]
                self.device = mine[0].device
                self.empty = torch.empty(0, device=self.device)
                for parameter in mine:
                    self.store[id(parameter)] = parameter.detach().to("cpu", copy=True)
                self.release(mine)
                layer.register_forward_pre_hook(lambda layer, args, mine=mine: self.load(mine))
                layer.register_forward_hook(lambda layer, args, output, mine=mine: self.release(mine))

    def owns(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self.store

    def load(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = self.store[id(parameter)].to(self.device)

    def release(self, parameters: list[nn.Parameter]) -> Any:
        for parameter in parameters:
            parameter.data = self.empty
