"""Layerwise offload as methods of a module: by inheritance, or given to a module of another library."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from park_core.component import OffloadedComponent, configure, disable, offload_of
from park_core.config import OffloadConfig
from park_core.errors import ParkError
from park_core.layers import check_layer_names, outermost_lists
from park_core.layerwise import LayerwiseOffloadManager
from park_core.report import ParkReport, RestoreReport
from park_core.sizes import parse_size
from park_core.untraced import uncompiled
from park_core.updates import iter_materialized_weights, update_cpu_weights

__all__ = ["LayerwiseOffloadableModuleMixin", "layerwise_offloadable"]

M = TypeVar("M", bound=nn.Module)


class LayerwiseOffloadableModuleMixin:
    """For a module whose repeated layers are streamed, and whose other weights are parked, while it is idle.

    Attributes:
        layer_names: dotted names of the lists of layers; a class or an instance sets them.
    """

    layer_names: Sequence[str] = ()

    @property
    def layerwise_offload_managers(self) -> list[LayerwiseOffloadManager]:
        """One per list of layers; empty before :meth:`configure_layerwise_offload`."""
        offload = offload_of(self)  # type: ignore[arg-type]
        return [] if offload is None else offload.managers

    def configure_layerwise_offload(
        self,
        config: OffloadConfig | None = None,
        *,
        device: torch.device | str | None = None,
        component_name: str | None = None,
    ) -> None:
        """Stream the named lists of layers, and move the rest of the module to the device.

        Args:
            config: settings; overrides for ``component_name`` in it are applied.
            device: where the module runs; default: where its weights are, or else the current accelerator.
            component_name: for reports and errors; default: the name of the class.

        Raises:
            LayerNameError: a name that does not lead to a list of modules of its own. Nothing was changed.
            ParkError: it cannot be offloaded (a meta parameter, FSDP, a gradient, no device). Nothing was changed.
        """
        names = self.layer_names
        configure(self, names, config=config, device=device, component_name=component_name)  # type: ignore[arg-type]

    def disable_layerwise_offload(self) -> None:
        """Bring every weight to the device for good, and take hooks and host copies away."""
        disable(self)  # type: ignore[arg-type]

    def park_non_layer_weights(self, *, need: int | str | None = None) -> ParkReport:
        """Move the non-layer weights to the host until :meth:`restore_non_layer_weights`, if that pays.

        Not under a forward of another thread: only a use (``ComponentResidencyManager.use``) makes a park wait.

        Args:
            need: bytes (or ``"1 GiB"``) that the next stage needs; decides instead of the significance.
        """
        return _configured(self).parking.park(need=None if need is None else parse_size(need))

    def restore_non_layer_weights(self) -> RestoreReport:
        """Bring the parked weights back, bit for bit."""
        return _configured(self).parking.restore()

    def update_cpu_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write new values into weights, wherever they are; see :func:`park_core.updates.update_cpu_weights`."""
        update_cpu_weights(self, weights)  # type: ignore[arg-type]

    def iter_materialized_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter with its real values, wherever they are."""
        return iter_materialized_weights(self)  # type: ignore[arg-type]

    def prepare_for_next_req(self) -> None:
        """Load the resident layers and start loading the first streamed ones."""
        _configured(self).prepare_for_next_req()


def layerwise_offloadable(
    module: M,
    layer_names: Sequence[str] | None,
    *,
    config: OffloadConfig | None = None,
    device: torch.device | str | None = None,
    component_name: str | None = None,
) -> M:
    """Give a module of any class the methods of :class:`LayerwiseOffloadableModuleMixin`.

    It stays the same object of the same class. With ``device`` or ``config`` it is configured at once. Of a module that
    ``torch.compile`` made, the one that was compiled gets them.

    Args:
        module: the component.
        layer_names: dotted names of its lists of layers; None finds the outermost lists of at least two like layers.
        config, device, component_name: see :meth:`LayerwiseOffloadableModuleMixin.configure_layerwise_offload`.

    Raises:
        LayerNameError, ParkError: as there; names of layers are looked at also where it is configured later.
    """
    plain = uncompiled(module)
    names = tuple(outermost_lists(plain) if layer_names is None else layer_names)
    check_layer_names(plain, names)
    plain.layer_names = names  # type: ignore[assignment]
    if not isinstance(plain, LayerwiseOffloadableModuleMixin):
        for verb in _VERBS:
            setattr(plain, verb, _Verb(plain, verb))
        plain.layerwise_offload_managers = _Managers(plain)  # type: ignore[assignment]
    if config is not None or device is not None:
        plain.configure_layerwise_offload(config, device=device, component_name=component_name)  # type: ignore[operator]
    return module


_VERBS = (
    "configure_layerwise_offload",
    "disable_layerwise_offload",
    "park_non_layer_weights",
    "restore_non_layer_weights",
    "prepare_for_next_req",
    "update_cpu_weights",
    "iter_materialized_weights",
)


class _Bound:
    """Something that belongs to one module, held weakly. A copy of the module gets one of its own."""

    def __init__(self, module: nn.Module, *args: Any) -> None:
        self._module, self._args = weakref.ref(module), args

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        module = self._module()
        assert module is not None  # it is being copied
        return type(self)(memo.get(id(module), module), *self._args)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), *self._args)


class _Verb(_Bound):
    """A method of the mixin."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (name,) = self._args
        return getattr(LayerwiseOffloadableModuleMixin, name)(self._module(), *args, **kwargs)


class _Managers(_Bound, Sequence[LayerwiseOffloadManager]):
    """``layerwise_offload_managers`` as an attribute of an instance."""

    def __getitem__(self, index: Any) -> Any:
        return self._managers()[index]

    def __len__(self) -> int:
        return len(self._managers())

    def _managers(self) -> list[LayerwiseOffloadManager]:
        module = self._module()
        offload = None if module is None else offload_of(module)
        return [] if offload is None else offload.managers


def _configured(module: object) -> OffloadedComponent:
    offload = offload_of(module)  # type: ignore[arg-type]
    if offload is None:
        name = type(module).__name__
        raise ParkError(
            f"{name} is not under layerwise offload yet; call configure_layerwise_offload(device=...) first"
        )
    return offload
