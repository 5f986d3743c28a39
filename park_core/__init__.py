"""Parking: the weights of an idle pipeline component wait on the host until its next use.

To use it, start with :class:`ComponentResidencyManager`, or with the methods of
:class:`LayerwiseOffloadableModuleMixin`.

To read it, follow one park from the end of a use to the last byte:

1. ``residency``: who is on the device during which use; ``mixin`` and ``component``: one component under offload;
2. ``parking``: park and restore, step by step; ``decision``: whether to park, by what ``memory`` measures; ``report``;
3. ``survey``: what a component is made of, as groups of tensors over one ``storage``; ``wrappers``, whose bytes are in
   other tensors; ``placement`` of weights that come from the host;
4. ``transfer``: how bytes move; ``host_copy``: where they go, or stay if there is a ``mapping`` from a checkpoint;
   ``fingerprint``: whether they are still current;
5. ``parked_tensor``: what a weight answers meanwhile; ``guard``: what its module does.

Then the layers, which move during a forward: ``layers``, ``layerwise``, ``loaded``, ``pinned``, ``untraced``; and
``updates`` of weights wherever they are. ``config``, ``errors`` and ``sizes`` explain themselves on the way.
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
