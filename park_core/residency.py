"""Who is on the device, during which use: strategies, and the manager that applies them."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from park_core.component import OffloadedComponent, hold_in, offload_of
from park_core.config import OffloadConfig
from park_core.errors import ParkError
from park_core.memory import device_headroom
from park_core.parking import Parking, use_lock
from park_core.report import ParkReport, RestoreReport
from park_core.sizes import parse_size
from park_core.untraced import uncompiled

__all__ = [
    "ComponentOffloadStrategy",
    "ComponentResidencyManager",
    "ComponentResidencyStrategy",
    "ComponentUse",
    "LayerwiseOffloadStrategy",
    "ResidencyState",
    "ResidentStrategy",
]


# Uses of a component that are under way in the thread that has its use lock: one inside another, or coroutines in turn.
# Of all managers together, because a component may be in several pipelines.
_under_way: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@dataclass(slots=True, kw_only=True)
class ComponentUse:
    """One stage's access to one component.

    Attributes:
        component_name: which component.
        stage_name: of the pipeline stage, for reports.
        memory_need: bytes that the stage needs besides the component's weights; idle components are parked for them.
        target_dtype: dtype in which the component is held from this use on.
        preferred: the next request starts with this component: leave it ready at the end of the request.
    """

    component_name: str
    stage_name: str = ""
    memory_need: int | None = None
    target_dtype: torch.dtype | None = None
    preferred: bool = False


@dataclass(slots=True)
class ResidencyState:
    """What strategies share during one request.

    Attributes:
        device: where the components run.
        reports: what was parked and restored, in order.
        uses: the uses of this request so far, the last one of each component.
        order: the components that are still to be used, in order, as far as that was declared.
    """

    device: torch.device
    reports: list[ParkReport | RestoreReport] = field(default_factory=list)
    uses: dict[str, ComponentUse] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


class ComponentResidencyStrategy:
    """Where one component is before, during and after its uses. The base class does nothing."""

    def prepare_for_use(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> None:
        """Make the component ready to run."""

    def prefetch_for_use(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> None:
        """Start to make it ready, ahead of time."""
        self.prepare_for_use(module, use, state)

    def finish_use(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> None:
        """Its use is over. Called again at the end of the request; the second call must be harmless."""

    def finish_request(self, module: nn.Module, use: ComponentUse, state: ResidencyState, *, preferred: bool) -> None:
        """The request is over: make a preferred component ready for the next one, and the others idle."""
        if preferred:
            self.prepare_for_use(module, use, state)
        else:
            self.finish_use(module, use, state)


class ResidentStrategy(ComponentResidencyStrategy):
    """The component stays on the device."""

    def prepare_for_use(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> None:
        never = OffloadConfig(parking="never")
        report = Parking(module, use.component_name, never, state.device).restore()
        if report.bytes_restored:
            state.reports.append(report)


class ComponentOffloadStrategy(ComponentResidencyStrategy):
    """The whole component is on the device during a use only. The host copy is the master: what the use did not change
    is not transferred back."""

    def __init__(self) -> None:
        self._parkings: weakref.WeakKeyDictionary[nn.Module, Parking] = weakref.WeakKeyDictionary()

    def prepare_for_use(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> None:
        state.reports.append(self._parking(module, use, state).restore())

    def finish_use(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> None:
        state.reports.append(self._parking(module, use, state).park())

    def _parking(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> Parking:
        if module not in self._parkings:
            always = OffloadConfig(parking="always")
            self._parkings[module] = Parking(module, use.component_name, always, state.device, buffers=True)
        return self._parkings[module]


class LayerwiseOffloadStrategy(ComponentResidencyStrategy):
    """The layers are streamed, and between uses the non-layer weights are parked if that pays."""

    def prepare_for_use(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> None:
        offload = _offload(module, use)
        state.reports.append(offload.parking.restore())
        offload.prepare_for_next_req()

    def finish_use(self, module: nn.Module, use: ComponentUse, state: ResidencyState) -> None:
        offload = _offload(module, use)
        offload.release_layers()
        state.reports.append(offload.parking.park())


class ComponentResidencyManager:
    """Keeps the components of a pipeline on the device in turn.

    Args:
        components: the modules by name.
        strategies: by component name; default: :class:`LayerwiseOffloadStrategy` for a component under layerwise
            offload, :class:`ResidentStrategy` for any other.
        config: settings for components that are ``layerwise_offloadable`` but not configured yet; its
            ``compute_dtype`` is for all components.
        device: where the components run; default: the current accelerator.
    """

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        strategies: Mapping[str, ComponentResidencyStrategy] | None = None,
        config: OffloadConfig | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self.components = {name: uncompiled(module) for name, module in components.items()}
        self._given = dict(components)
        where = torch.accelerator.current_accelerator() if device is None else torch.device(device)
        if where is None:
            raise ParkError("there is no accelerator; say which device the components are for")
        self._state = ResidencyState(torch.empty(0, device=where).device)
        if unknown := set(strategies or {}) - set(self.components):
            raise ParkError(f"strategies for unknown components {sorted(unknown)}; known: {sorted(self.components)}")
        for name, module in self.components.items():
            if config is None:
                continue
            if (dtype := config.for_component(name).compute_dtype) is not None:
                hold_in(module, dtype)
            if offload_of(module) is None and hasattr(module, "configure_layerwise_offload"):
                module.configure_layerwise_offload(config, device=where, component_name=name)  # type: ignore[operator]
        self.strategies: dict[str, ComponentResidencyStrategy] = {
            name: LayerwiseOffloadStrategy() if offload_of(module) else ResidentStrategy()
            for name, module in self.components.items()
        } | dict(strategies or {})

    @property
    def reports(self) -> list[ParkReport | RestoreReport]:
        """What was parked and restored in the newest request, in order."""
        return self._state.reports

    def begin_request(self, order: Sequence[str] = ()) -> None:
        """A new request: forget the reports and uses of the last one.

        Args:
            order: the components in the order of their uses, if it is known. Then the next one is made ready at the end
                of each use, if there is room for it.
        """
        for name in order:
            self._known(name)
        self._state.reports, self._state.uses, self._state.order = [], {}, list(order)

    @contextmanager
    def use(
        self,
        name: str,
        *,
        stage_name: str = "",
        memory_need: int | str | None = None,
        target_dtype: torch.dtype | None = None,
        preferred: bool = False,
    ) -> Iterator[nn.Module]:
        """Run a stage with a component: it is ready inside the block, and idle after it, also if the stage fails.

        Another thread's use of the same component waits. Of several uses in one thread, one inside another or by turns
        of coroutines, the first makes it ready, and the last to end makes it idle.

        Args:
            name: of the component.
            stage_name: of the stage, for reports.
            memory_need: bytes (or ``"1 GiB"``) that the stage needs besides this component's weights.
            target_dtype: see :class:`ComponentUse`.
            preferred: see :class:`ComponentUse`.
        """
        self._known(name)
        need = None if memory_need is None else parse_size(memory_need)
        use = ComponentUse(
            component_name=name,
            stage_name=stage_name,
            memory_need=need,
            target_dtype=target_dtype,
            preferred=preferred,
        )
        module, strategy = self.components[name], self.strategies[name]
        with use_lock(module):
            _under_way[module] = _under_way.get(module, 0) + 1
            try:
                if _under_way[module] == 1:
                    self._state.uses[name] = use
                    if target_dtype is not None:
                        hold_in(module, target_dtype)  # before they come: that takes less memory
                    self._make_room(use)
                    strategy.prepare_for_use(module, use, self._state)
                yield self._given[name]
            except BaseException as failure:
                if _under_way[module] == 1:
                    self._finish_after(failure, use)
                raise
            else:
                if _under_way[module] == 1:
                    strategy.finish_use(module, use, self._state)
            finally:
                _under_way[module] -= 1
            ended = not _under_way[module]
        if ended:
            self._prefetch_after(name)

    def finish_request(self) -> None:
        """The request is over: every component that was used becomes what its strategy says, also if one fails."""
        failures: list[Exception] = []
        for name, use in self._state.uses.items():
            module, preferred = self.components[name], use.preferred
            with use_lock(module):
                if _under_way.get(module):
                    continue  # by a coroutine or another manager, which will make it idle
                try:
                    self.strategies[name].finish_request(module, use, self._state, preferred=preferred)
                except Exception as failure:
                    failures.append(failure)
        self._state.order = []
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"and another component failed: {other!r}")
            raise failures[0]

    def prefetch(self, name: str) -> None:
        """Start to make a component ready that is used next."""
        self._known(name)
        use = ComponentUse(component_name=name)
        with use_lock(self.components[name]):
            self._state.uses.setdefault(name, use)
            self.strategies[name].prefetch_for_use(self.components[name], use, self._state)

    def _prefetch_after(self, name: str) -> None:
        """Make the component ready that comes next in the declared order. That is a favour: without room nothing is
        done, and the next use does it, which may make room first."""
        order = self._state.order
        if name not in order:
            return
        del order[: order.index(name) + 1]
        if not order or not (lock := use_lock(self.components[order[0]])).acquire(blocking=False):  # it is in use
            return
        try:
            self.prefetch(order[0])
        except torch.OutOfMemoryError as failure:
            traceback.clear_frames(failure.__traceback__)
        finally:
            lock.release()

    def _known(self, name: str) -> None:
        if name not in self.components:
            raise ParkError(f"no component {name!r}; there are {sorted(self.components)}")

    def _make_room(self, use: ComponentUse) -> None:
        """Park idle components that were kept on the device, until the stated need is covered."""
        if use.memory_need is None:
            return
        device = self._state.device
        own = offload_of(self.components[use.component_name])
        need = use.memory_need + (own.parking.parked_bytes(device) if own else 0)
        for module in self.components.values():
            if device_headroom(device, request=need).bytes >= need:
                return
            offload, lock = offload_of(module), use_lock(module)
            if offload is None or _under_way.get(module) or not lock.acquire(blocking=False):  # it is in use
                continue
            try:
                offload.release_layers()
                self._state.reports.append(offload.parking.park(need=need))
            finally:
                lock.release()

    def _finish_after(self, failure: BaseException, use: ComponentUse) -> None:
        """The stage failed: still make its component idle. A second failure must not hide the first."""
        name = use.component_name
        try:
            self.strategies[name].finish_use(self.components[name], use, self._state)
        except Exception as second:
            failure.add_note(f"and component {name!r} could not be made idle: {second!r}")


def _offload(module: nn.Module, use: ComponentUse) -> OffloadedComponent:
    offload = offload_of(module)
    if offload is None:
        raise ParkError(f"component {use.component_name!r} is not under layerwise offload; configure it first")
    return offload
