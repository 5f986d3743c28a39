"""Parking: the weights of an idle pipeline component wait on the host until its next use.

Start with :class:`ComponentResidencyManager`, or with the methods of :class:`LayerwiseOffloadableModuleMixin`.
"""

from park_core.config import PARK_SIGNIFICANCE, OffloadConfig, PerformanceMode
from park_core.errors import LayerNameError, ParkError, StaleMappingError, WeightsParkedError
from park_core.layerwise import LayerwiseOffloadManager
from park_core.memory import Headroom, HostHeadroom, device_headroom, host_headroom
from park_core.mixin import LayerwiseOffloadableModuleMixin, layerwise_offloadable
from park_core.parking import Parking
from park_core.report import ParkDecision, ParkReport, RestoreReport, Skipped
from park_core.residency import (
    ComponentOffloadStrategy,
    ComponentResidencyManager,
    ComponentResidencyStrategy,
    ComponentUse,
    LayerwiseOffloadStrategy,
    ResidencyState,
    ResidentStrategy,
)
from park_core.storage import GroupState, StorageGroup

__all__ = [
    "PARK_SIGNIFICANCE",
    "ComponentOffloadStrategy",
    "ComponentResidencyManager",
    "ComponentResidencyStrategy",
    "ComponentUse",
    "GroupState",
    "Headroom",
    "HostHeadroom",
    "LayerNameError",
    "LayerwiseOffloadManager",
    "LayerwiseOffloadStrategy",
    "LayerwiseOffloadableModuleMixin",
    "OffloadConfig",
    "ParkDecision",
    "ParkError",
    "ParkReport",
    "Parking",
    "PerformanceMode",
    "ResidencyState",
    "ResidentStrategy",
    "RestoreReport",
    "Skipped",
    "StaleMappingError",
    "StorageGroup",
    "WeightsParkedError",
    "device_headroom",
    "host_headroom",
    "layerwise_offloadable",
]
