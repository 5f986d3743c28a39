"""sglang's `LayerwiseOffloadableModuleMixin` and `LayerwiseOffloadStrategy`, of the release that is first on the path.

The folder ``stand_ins`` comes before it on the path, so that these modules can be imported without the rest of sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from sglang.multimodal_gen.runtime import platforms
from sglang.multimodal_gen.runtime.managers.memory_managers import layerwise_offload_components
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from torch import nn

from pytest_park.contract import Parkable
from pytest_park.contract.probes import Stack, batch
from pytest_park.fakegpu import FakeDevice


class FakeGpuPlatform(platforms.Platform):
    """What sglang asks of a platform here, answered as its ``CudaPlatform`` does."""

    _enum = platforms.PlatformEnum.UNSPECIFIED
    device_name = device_type = "fakegpu"

    @classmethod
    def get_local_torch_device(cls) -> torch.device:
        return torch.device("fakegpu", torch.get_device_module("fakegpu").current_device())

    @classmethod
    def get_available_gpu_memory(cls, device_id: int | None = None, **options: Any) -> float:
        """In GiB."""
        return torch.get_device_module("fakegpu").mem_get_info(device_id)[0] / (1 << 30)


# Platforms from outside can be declared only since 0.5.23; this is where each release keeps the one that it chose.
platforms._current_platform = FakeGpuPlatform()

# These ask for the platform while they are imported.
from sglang.multimodal_gen.runtime.managers.memory_managers.component_manager import (  # noqa: E402
    ComponentUse,
    ResidencyState,
)
from sglang.multimodal_gen.runtime.managers.memory_managers.component_residency_strategies import (  # noqa: E402
    LayerwiseOffloadStrategy,
)
from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import (  # noqa: E402
    PARK_SIGNIFICANCE,
    LayerwiseOffloadableModuleMixin,
)

#: No prefetch beyond one layer and no resident layers, which is the default of components that are not a DiT.
TUNING = (0.0, 0.0, layerwise_offload_components.RESIDENCY_POLICY_LEADING)
if hasattr(layerwise_offload_components, "RESIDENCY_LIFETIME_FORWARD"):
    TUNING = (*TUNING, layerwise_offload_components.RESIDENCY_LIFETIME_FORWARD)
ARGUMENTS = ServerArgs(TUNING)


class Component(LayerwiseOffloadableModuleMixin, Stack):
    layer_names: ClassVar[list[str]] = ["blocks"]


def component(gpu: FakeDevice) -> Parkable:
    return parkable_of(Component(gpu.device), batch(gpu.device), ("blocks",))


def parkable_of(module: nn.Module, inputs: Any, streamed: Sequence[str] = ()) -> Parkable:
    if not isinstance(module, LayerwiseOffloadableModuleMixin):
        kind = type(module)
        mixed = type(kind.__name__, (LayerwiseOffloadableModuleMixin, kind), {"layer_names": list(streamed)})
        module.__class__ = mixed
    module.configure_layerwise_offload(ARGUMENTS)
    strategy, use, state = LayerwiseOffloadStrategy(), ComponentUse("stage", "component"), ResidencyState()
    return Parkable(
        module,
        inputs,
        streamed=streamed,
        adopt=parkable_of,
        significance=PARK_SIGNIFICANCE,
        begin_use=lambda: strategy.prepare_for_use(module, use, state),
        finish_use=lambda: strategy.finish_use(module, use, state),
        finish_request=lambda: strategy.finish_request(module, use, state, preferred=False),
        keeps_host_copies=True,
        ends={"disable_offload": module.disable_offload},
        reconfigure=lambda: module.configure_layerwise_offload(ARGUMENTS),
    )
