"""Random numbers of a fake device: a CPU generator of its own does the work."""

from __future__ import annotations


import torch


class Generator:
    """``torch.Generator`` of a fake device. torch makes its C++ generators only for back ends written in C++, so this
    is a look-alike; *on_host* is the CPU generator behind it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_host = torch.Generator("cpu")

    def manual_seed(self, seed: int) -> Generator:
        self.on_host.manual_seed(seed)
        return self

    def seed(self) -> int:
        return self.on_host.seed()

    def initial_seed(self) -> int:
        return self.on_host.initial_seed()

    def get_state(self) -> torch.Tensor:
        return self.on_host.get_state()

    def set_state(self, state: torch.Tensor) -> Generator:
        self.on_host.set_state(state)
        return self
