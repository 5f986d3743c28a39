"""The component of this project: turns symbols into a waveform."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class Voice(nn.Module):
    """Symbols of shape [batch, time] to samples of shape [batch, time]."""

    def __init__(self, symbols: int = 32, width: int = 16) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.smooth = weight_norm(nn.Conv1d(width, width, 3, padding=1))
        self.norm = nn.LayerNorm(width)
        self.loudness = nn.Parameter(torch.tensor(0.5))
        self.to_symbols = nn.Linear(width, symbols, bias=False)
        self.to_symbols.weight = self.symbols.weight  # tied
        self.register_buffer("window", torch.hann_window(symbols))

    def forward(self, spoken: Tensor) -> Tensor:
        hidden = self.symbols(spoken)
        hidden = hidden + self.smooth(hidden.transpose(1, 2)).transpose(1, 2)
        scores = self.to_symbols(self.norm(hidden))
        wave: Tensor = (scores * self.window).sum(-1) * self.loudness
        return wave
