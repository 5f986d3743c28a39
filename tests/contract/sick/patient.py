"""The module that every implementation of the bank parks: small, with a buffer and weights of several shapes."""

from __future__ import annotations

import torch
from torch import nn

from pytest_park.contract.probes import batch, filled, linear


def component(device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A fresh component and its example inputs."""
    module = nn.Sequential(linear(16, 16, device), filled(nn.BatchNorm1d(16, device=device)), linear(16, 8, device))
    return module, (batch(device, 16),)
