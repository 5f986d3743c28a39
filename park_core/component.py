"""One component under layerwise offload: its layer managers and its parking, together."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from park_core.config import OffloadConfig
from park_core.errors import ParkError
from park_core.guard import refresh_guards
from park_core.layers import check_layer_names
from park_core.layerwise import LayerwiseOffloadManager
from park_core.parked_tensor import show
from park_core.parking import Parking, moving, use_lock
from park_core.pinned import PinBudget
from park_core.survey import Survey, owned_tensors, survey
from park_core.wrappers import follow_inner_tensors

__all__ = ["OffloadedComponent", "configure", "disable", "hold_in", "offload_of"]

# Not an attribute of the module: a copy of the module is a module of its own, and a pickle has nothing of ours in it.
_offloads: weakref.WeakKeyDictionary[nn.Module, OffloadedComponent] = weakref.WeakKeyDictionary()


class OffloadedComponent:
    """Streams the layers of a component and parks the rest of it.

    Attributes:
        name: of the component.
        config: its configuration.
        device: where it runs.
        managers: one per list of layers.
        parking: of the non-layer weights.
    """

    def __init__(
        self, module: nn.Module, layer_names: Sequence[str], name: str, config: OffloadConfig, device: torch.device
    ):
        self.name, self.config, self.device = name, config, device
        self.managers: list[LayerwiseOffloadManager] = []
        self.parking = Parking(module, name, config, device)
        before = survey(module, name)
        try:
            budget = PinBudget(config.pin_memory)
            for layers in layer_names:
                self.managers.append(
                    LayerwiseOffloadManager(
                        module, layers, device=device, config=config, component_name=name, budget=budget
                    )
                )
            self.parking.restore()
        except BaseException as failure:
            self._undo(before)
            traceback.clear_frames(failure.__traceback__)
            raise

    def _undo(self, before: Survey) -> None:
        """Configuring failed: what was resident before is so again, on the device or on the host."""
        for manager in self.managers:
            manager.remove()
        for group, storage in before.resident.items():
            group.device, group.host, group.streamed = storage.device, None, False
            show(group, storage)
        for wrapper in before.wrappers:
            follow_inner_tensors(wrapper)
        refresh_guards(self.parking.module)
        self.parking.retire()

    def prepare_for_next_req(self) -> None:
        """Load the resident layers and start the first streamed ones."""
        with moving:
            for manager in self.managers:
                manager.adopt()
                manager.prepare_for_next_req()

    def release_layers(self) -> None:
        """Take all layers off the device."""
        for manager in self.managers:
            manager.release_all()

    def remove(self) -> None:
        """End the offload: every weight is on the device, nothing of ours is left on the module."""
        self.parking.restore()
        for manager in self.managers:
            manager.load_all_layers()
        for manager in self.managers:
            manager.remove()
        self.managers = []
        self.parking.close()


def configure(
    module: nn.Module,
    layer_names: Sequence[str],
    *,
    config: OffloadConfig | None,
    device: torch.device | str | None,
    component_name: str | None,
) -> OffloadedComponent:
    """Put a component under layerwise offload, or put it there anew with other settings."""
    name = component_name or type(module).__name__
    with use_lock(module), moving:
        check_layer_names(module, layer_names)  # first: nothing is touched for a typing error
        if refusal := survey(module, name).refusal:
            raise ParkError(f"component {name!r} cannot be offloaded: {refusal}")
        where = _device_of(module, name) if device is None else torch.empty(0, device=device).device
        if where.type == "cpu":
            raise ParkError(f"component {name!r} is to run on the host: there is no device to offload it from")
        if (old := _offloads.pop(module, None)) is not None:
            for manager in old.managers:
                manager.release_all()
                manager.remove()
            old.parking.retire()
        settings = (config or OffloadConfig()).for_component(name)
        if settings.compute_dtype is not None:
            hold_in(module, settings.compute_dtype)
        offload = _offloads[module] = OffloadedComponent(module, layer_names, name, settings, where)
        return offload


def disable(module: nn.Module) -> None:
    """End the offload of a component; without one nothing happens."""
    with use_lock(module), moving:
        if (offload := _offloads.get(module)) is not None:
            offload.remove()  # which may run out of memory; then the offload goes on
            del _offloads[module]


def hold_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the floating-point weights and buffers of a component in ``dtype`` from now on, wherever they are.

    Those of one byte (float8) stay: they are quantised, and a cast would not bring the values back.
    """

    def other(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.dtype != dtype

    if any(other(member.tensor) for member in owned_tensors(module)):
        module._apply(lambda tensor: tensor.to(dtype) if other(tensor) else tensor)  # as Module.to does


def offload_of(module: nn.Module) -> OffloadedComponent | None:
    """The offload that a component is under, if any."""
    return _offloads.get(module)


def _device_of(module: nn.Module, name: str) -> torch.device:
    tensors: list[Tensor] = [member.tensor for member in owned_tensors(module)]
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.accelerator.current_accelerator())
    if device is None:
        raise ParkError(f"component {name!r} is on the host and there is no accelerator; say which device it is for")
    return torch.empty(0, device=device).device
