"""What a user can choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal, NoReturn, get_args

import torch

from park_core.sizes import parse_size

__all__ = ["PARK_SIGNIFICANCE", "OffloadConfig", "PerformanceMode"]

PARK_SIGNIFICANCE = 0.1
"""Parking pays from this share of the headroom on: weights that are less than a tenth of the room are left alone."""

Parking = Literal["auto", "always", "never"]
ResidencyPolicy = Literal["leading", "strided"]


class PerformanceMode(StrEnum):
    """What the user would rather spend: memory or time."""

    AUTO = "auto"
    SPEED = "speed"
    MEMORY = "memory"
    MANUAL = "manual"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"performance_mode {value!r} is none of {', '.join(cls)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """How the components of a pipeline share the device.

    Attributes:
        performance_mode: ``parking="auto"`` parks in mode ``memory`` only.
        parking: ``auto`` follows the mode and the headroom; ``always`` parks at every end of use, whatever the room;
            ``never`` keeps the non-layer weights on the device.
        significance: share of the headroom from which parking pays (``auto`` only).
        prefetch: how many layers to load ahead of the one that runs, as a count or as a fraction of the layers.
        resident_layers: how many layers stay on the device during a use, as a count or as a fraction of the layers.
        residency_policy: which ones: the ``leading`` ones, or ``strided`` evenly among the streamed ones.
        pin_memory: hold layers in pinned host memory, in so many bytes of it (or ``"8 GiB"``) per component, or with
            ``True`` in half of what the host can give. Off by default: the kernel can never reclaim pinned pages.
        keep_host_copies: keep the host copy of a restored weight, so that the next park moves only what changed.
        staging: move large weights through a few pinned buffers instead of the driver's own.
        immutable_weights: nobody writes to the weights, so a kept host copy is current without a look at the device: at
            a park, and at the end of each layer whose weights are quantised or inference tensors.
        compute_dtype: hold floating-point weights in this dtype from the time that a component is configured: half the
            bytes to keep and to move for a component that is loaded in float32 and runs in bfloat16. Not float8
            weights, which are quantised. None: as loaded.
        components: overrides by component name, for instance ``{"vae": {"resident_layers": 1.0}}``.
    """

    performance_mode: PerformanceMode = PerformanceMode.AUTO
    parking: Parking = "auto"
    significance: float = PARK_SIGNIFICANCE
    prefetch: int | float = 1
    resident_layers: int | float = 0
    residency_policy: ResidencyPolicy = "leading"
    pin_memory: bool | int | str = False
    keep_host_copies: bool = True
    staging: bool = True
    immutable_weights: bool = False
    compute_dtype: torch.dtype | None = None
    components: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "performance_mode", PerformanceMode(self.performance_mode))
        _one_of("parking", self.parking, get_args(Parking))
        _one_of("residency_policy", self.residency_policy, get_args(ResidencyPolicy))
        if not self.significance >= 0:  # nor is it NaN
            raise ValueError(
                f"significance is a share of the headroom and must not be negative, got {self.significance}"
            )
        if not isinstance(self.pin_memory, bool):
            _size("pin_memory", self.pin_memory)
        if self.compute_dtype is not None and not self.compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype is a floating-point dtype; got {self.compute_dtype}")
        for name in ("prefetch", "resident_layers"):
            _count_or_fraction(name, getattr(self, name))
        known = {f.name for f in fields(self)} - {"components"}
        for component, overrides in self.components.items():
            if unknown := set(overrides) - known:
                raise ValueError(
                    f"components[{component!r}] has unknown settings {sorted(unknown)}; known: {sorted(known)}"
                )
            self.for_component(component)  # raises now what is wrong with them, and not at the component's turn

    def for_component(self, name: str) -> OffloadConfig:
        """This configuration with the overrides for one component applied."""
        return replace(self, components={}, **self.components.get(name, {}))


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _size(name: str, value: int | str) -> None:
    try:
        parse_size(value)
    except ValueError as error:
        raise ValueError(f"{name} is a bool or a size: {error}") from None


def _count_or_fraction(name: str, value: int | float) -> None:
    if not value >= 0 or (isinstance(value, float) and value > 1.0):
        raise ValueError(f"{name} is a count (int >= 0) or a fraction (float from 0.0 to 1.0); got {value!r}")
