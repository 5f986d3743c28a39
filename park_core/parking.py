"""Parking: the non-layer weights of one component, between its uses.

``park()`` reads top to bottom: survey the component, decide, copy everything, swap everything, measure what was freed.
``restore()`` is the way back. Both are idempotent, and a failure anywhere leaves everything as it was.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from park_core.config import OffloadConfig
from park_core.decision import config_parks, decide
from park_core.errors import ParkError
from park_core.fingerprint import Fingerprint, known_fingerprints
from park_core.guard import refresh_guards
from park_core.host_copy import HostCopy
from park_core.parked_tensor import hide, placeholder, show
from park_core.placement import placed
from park_core.report import ParkDecision, ParkReport, RestoreReport, Skipped
from park_core.storage import GroupState, StorageGroup
from park_core.survey import Survey, groups_of, needed_by_autograd, plain_tensors, survey, viewed_elsewhere
from park_core.transfer import Transfer, synchronize, transfer

__all__ = ["Parking", "moving", "use_lock"]

logger = logging.getLogger(__name__)

moving = threading.RLock()
"""Held while weights move. One for all components: they can share weights, and they do share the link to the device."""

_use_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()

_parkings: weakref.WeakSet[Parking] = weakref.WeakSet()


def use_lock(module: nn.Module) -> threading.RLock:
    """Held during a use of a component: parking it waits for the end of the use. Always taken before ``moving``."""
    with moving:
        return _use_locks.setdefault(module, threading.RLock())


class Parking:
    """Everything about parking one component. Holds the component and its weights weakly.

    Args:
        module: the component.
        component: its name, for reports and errors.
        config: its configuration.
        device: where its weights belong: ``restore`` brings weights there that are still on the host. None leaves them.
        buffers: park buffers, too. Off by default: a table shared by many layers stays where it is.
    """

    def __init__(
        self,
        module: nn.Module,
        component: str,
        config: OffloadConfig,
        device: torch.device | None = None,
        *,
        buffers: bool = False,
    ) -> None:
        self.component, self.config, self.device, self.buffers = component, config, device, buffers
        self.closed = False
        self._module = weakref.ref(module)
        self._parked: list[weakref.ref[StorageGroup]] = []
        with moving:
            found = survey(module, component)
            for group in found.resident:
                group.moved = False  # the user says anew where it belongs
            self._hold([*found.resident, *found.parked])
            _parkings.add(self)

    # -- park ----------------------------------------------------------------------------------------------------------

    def park(self, *, need: int | None = None) -> ParkReport:
        """Move the non-layer weights to the host if that pays; see :class:`ParkDecision` for what pays.

        It waits for the end of a use (``ComponentResidencyManager.use``) and for what the device still does. A forward
        of another thread outside of a use takes no lock, which would cost every forward: do not park under it.

        Args:
            need: bytes that the next stage needs. Decides instead of the significance.
        """
        with use_lock(self.module), moving, torch.no_grad():
            started = time.perf_counter()
            if self.closed:
                reason = "this parking was closed; it does nothing any more"
                return ParkReport(component=self.component, decision=ParkDecision(verdict="keep", reason=reason))
            in_place, away = groups_of(self.module, self.component, buffers=self.buffers)
            resident = [group for group in in_place if not group.streamed and group.device.type != "cpu"]
            parked = [group for group in away if not group.streamed]
            report = ParkReport(component=self.component, decision=self._decide(resident, parked, need))
            if report.decision.verdict == "keep":  # what stands in the way of a park would only make it smaller
                self._release(in_place | away)
                for group in resident:
                    if group.host is not None and group.host.file is None:  # a mapped one costs nothing
                        group.host = None
            else:
                self._survey_and_park(resident, parked, need, report)
            report.seconds = time.perf_counter() - started
            logger.info("%s", report)
            return report

    def _survey_and_park(
        self, resident: list[StorageGroup], parked: list[StorageGroup], need: int | None, report: ParkReport
    ) -> None:
        """Park what can be parked of the ``resident`` groups; decide again if that is not all of them."""
        found = survey(self.module, self.component)
        movable, skipped = self._movable(found)
        if movable.keys() != set(resident):
            report.decision = self._decide(list(movable), parked, need)
        if found.refusal:
            self._hold([*found.resident, *found.parked])
            report.decision = ParkDecision(
                verdict="refuse", reason=found.refusal, bytes=sum(group.nbytes for group in [*movable, *parked])
            )
        elif report.decision.verdict == "park":
            report.skipped = found.skipped + skipped + plain_tensors(self.module)
            found.resident.clear()  # drop the storages, or nothing is freed below
            self._to_host(movable, report)

    def _movable(self, found: Survey) -> tuple[dict[StorageGroup, torch.UntypedStorage], list[Skipped]]:
        """The resident groups that parking would move, and those that it must leave, with the reason."""
        movable, skipped = {}, []
        self._release([*found.resident, *found.parked])
        for group, storage in found.resident.items():
            if group.streamed:
                continue
            reason = ""
            if group in found.buffers and not self.buffers:
                reason = "buffers stay on the device"
            elif group.device.type == "cpu":
                reason = "it is on the host already"
            elif group.holders and (others := sorted({p.component for r in group.holders if (p := r()) is not None})):
                reason = f"component {', '.join(map(repr, others))} still uses it"
            elif viewed_elsewhere(group, storage):
                reason = "a tensor outside the component's parameters and buffers views its bytes"
            elif needed_by_autograd(group):
                reason = "a backward that is still to come, or a script module, holds it"
            if reason:
                skipped.append(Skipped(group.name, reason, group.nbytes))
            else:
                movable[group] = storage
        return movable, skipped

    def _decide(self, resident: list[StorageGroup], parked: list[StorageGroup], need: int | None) -> ParkDecision:
        device = next((group.device for group in resident + parked), torch.device("cpu"))
        return decide(
            self.config,
            device,
            resident=sum(group.nbytes for group in resident),
            parked=sum(group.nbytes for group in parked),
            new_host_bytes=sum(group.nbytes for group in resident if group.host is None),
            returning=sum(p.parked_bytes(device) for p in _parkings if p is not self),
            need=need,
        )

    def _to_host(self, movable: dict[StorageGroup, torch.UntypedStorage], report: ParkReport) -> None:
        """Copy all, then swap all; or leave everything as it was."""
        if not movable:
            return
        copies: dict[StorageGroup, HostCopy] = {}
        kinds = {(g.device, v.dtype, v.inference) for g in movable for v in g.views}
        placeholders = [placeholder(*kind) for kind in kinds]  # made before they are needed
        for device in {group.device for group in movable}:
            synchronize(device)  # a side stream may still read what is about to be freed
        try:
            current = self._fingerprints(movable)
            stale = [g for g in movable if g.host is None or not g.host.fingerprint == current[g] is not None]
            for group, mover in self._movers(stale):
                copies[group] = mover.to_host(group, movable[group], into=group.host)
                copies[group].fingerprint = current[group]
            for group in movable:  # no name for the storage, or the last one is not freed below
                group.host, group.address = copies.get(group, group.host), movable[group].data_ptr()
                hide(group)
            refresh_guards(self.module)
        except BaseException as failure:
            for group, storage in movable.items():
                show(group, storage)
                group.host = None  # half written, perhaps
            refresh_guards(self.module)
            traceback.clear_frames(failure.__traceback__)  # whoever keeps the error keeps no memory with it
            raise
        del placeholders
        self._parked = [weakref.ref(group) for group in {*self._parked_groups(), *movable}]
        report.bytes_to_host = sum(group.nbytes for group in copies)
        report.bytes_freed, kept = _measure_freed(movable)
        report.skipped += kept

    # -- restore -------------------------------------------------------------------------------------------------------

    def restore(self) -> RestoreReport:
        """Bring every parked weight back to its device. Without a parked weight nothing is allocated and copied."""
        with use_lock(self.module), moving, torch.no_grad():
            started = time.perf_counter()
            report = RestoreReport(component=self.component)
            if self.closed:
                return report
            found = survey(self.module, self.component)
            groups = list(dict.fromkeys([g for g in found.parked if not g.streamed] + self._parked_groups()))
            with placed(found, self.device) as arrivals:
                self._to_device(groups + arrivals, report)
            self._hold([*found.resident, *found.parked])
            report.seconds = time.perf_counter() - started
            if groups:
                logger.info("%s", report)
            return report

    def _to_device(self, groups: list[StorageGroup], report: RestoreReport) -> None:
        """Allocate and copy all, then swap all; or leave everything as it was."""
        if not groups:
            return
        try:
            self._bring(groups)
            refresh_guards(self.module)
        except BaseException as failure:
            for group in groups:
                hide(group)
            refresh_guards(self.module)
            traceback.clear_frames(failure.__traceback__)
            raise
        self._parked = []
        storages = {group: storage for group in groups if (storage := _storage_of(group)) is not None}
        self._keep_or_drop(storages)
        report.bytes_restored = report.bytes_to_device = sum(group.nbytes for group in groups)
        report.bytes_relocated = sum(g.nbytes for g, s in storages.items() if g.address not in (0, s.data_ptr()))

    def _bring(self, groups: list[StorageGroup]) -> None:
        memory = {group: mover.to_device(group) for group, mover in self._movers(groups)}
        for group, tensor in memory.items():
            show(group, tensor)

    def _movers(self, groups: list[StorageGroup]) -> Iterator[tuple[StorageGroup, Transfer]]:
        """Each group with the way to move it."""
        for device in dict.fromkeys(group.device for group in groups):
            here = [group for group in groups if group.device == device]
            mover = transfer(device, max(group.nbytes for group in here), staged=self.config.staging)
            for group in here:
                yield group, mover

    # -- host copies that outlive a restore ----------------------------------------------------------------------------

    def _fingerprints(
        self, movable: dict[StorageGroup, torch.UntypedStorage]
    ) -> dict[StorageGroup, Fingerprint | None]:
        """What the device bytes are now. None: host copies are not kept, or there is no room to find out."""
        if not self.config.keep_host_copies:
            return dict.fromkeys(movable)
        if self.config.immutable_weights:
            return dict.fromkeys(movable, (1,))
        found: dict[StorageGroup, Fingerprint | None] = dict.fromkeys(movable)
        for device in {group.device for group in movable}:
            here = [group for group in movable if group.device == device]
            found |= zip(here, known_fingerprints([group.memory(movable[group]) for group in here]), strict=True)
        return found

    def _keep_or_drop(self, storages: dict[StorageGroup, torch.UntypedStorage]) -> None:
        """Keep host copies of resident groups that can save the next transfer; nobody else may hold their memory."""
        keep = config_parks(self.config) and self.config.keep_host_copies
        unknown = {g: s for g, s in storages.items() if g.host and g.host.kind == "adopted" and not g.host.fingerprint}
        current = self._fingerprints(unknown) if keep else {}
        for group in storages:
            host = group.host
            assert host is not None
            host.fingerprint = host.fingerprint or current.get(group)
            if not keep or host.fingerprint is None or host.viewed_elsewhere:
                group.host = None

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> RestoreReport:
        """Restore everything and drop the host copies. From now on this object does nothing."""
        with use_lock(self.module), moving:
            report = self.restore()
            for group in survey(self.module, self.component).resident:
                if not group.streamed:
                    group.host = None
            self.retire()
            return report

    def retire(self) -> None:
        """Leave the weights as they are to somebody else. From now on this object does nothing."""
        self.closed = True
        self._parked = []
        _parkings.discard(self)

    # -- what it knows -------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The component.

        Raises:
            ParkError: it does not exist any more.
        """
        module = self._module()
        if module is None:
            raise ParkError(f"component {self.component!r} does not exist any more")
        return module

    def parked_bytes(self, device: torch.device) -> int:
        """Bytes of this component that left ``device`` and will come back."""
        return sum(group.nbytes for group in self._parked_groups() if group.device == device)

    def _parked_groups(self) -> list[StorageGroup]:
        """The groups that this object parked and that nobody restored, dropped or made part of a layer since."""
        groups = (ref() for ref in self._parked)
        away = [group for group in groups if group is not None and group.state is GroupState.PARKED]
        return [group for group in away if not group.streamed and any(group.tensors())]

    def _hold(self, groups: list[StorageGroup]) -> None:
        me = weakref.ref(self)
        for group in groups:
            group.holders.add(me)

    def _release(self, groups: Iterable[StorageGroup]) -> None:
        me = weakref.ref(self)
        for group in groups:
            group.holders.discard(me)


def _measure_freed(movable: dict[StorageGroup, torch.UntypedStorage]) -> tuple[int, list[Skipped]]:
    """Bytes whose storage is gone once we let go of it, and the groups that somebody else keeps on the device."""
    groups, storages = list(movable), [weakref.ref(storage) for storage in movable.values()]
    movable.clear()
    kept = [group for group, storage in zip(groups, storages, strict=True) if storage() is not None]
    freed = sum(group.nbytes for group in groups) - sum(group.nbytes for group in kept)
    return freed, [
        Skipped(g.name, "parked, but something outside the component holds its memory", g.nbytes) for g in kept
    ]


def _storage_of(group: StorageGroup) -> torch.UntypedStorage | None:
    """The device memory of a resident group."""
    return next((tensor.untyped_storage() for _, tensor in group.tensors()), None)
