"""Random numbers of the fake device come from a CPU generator of its own, seeded like any other device's."""

from __future__ import annotations

import torch


def generator_for(generator: torch.Generator) -> torch.Generator:
    """The CPU generator that does the work for *generator*."""
    return generator
