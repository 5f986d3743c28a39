"""Layerwise offload: the repeated layers of a component, streamed to the device one by one."""

from __future__ import annotations

import traceback
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from park_core.config import OffloadConfig
from park_core.layers import find_layers, layer_count, resident_layers
from park_core.loaded import LoadedLayer
from park_core.parked_tensor import is_parked
from park_core.parking import moving
from park_core.pinned import PinBudget, pin
from park_core.placement import parked_in_place
from park_core.storage import GroupState, StorageGroup, bytes_of
from park_core.survey import Survey, owned_tensors, survey
from park_core.transfer import Transfer, backend_of, transfer, worth_staging
from park_core.untraced import untraced

__all__ = ["LayerwiseOffloadManager"]


@dataclass(slots=True)
class _Coming:
    """A layer whose copy was started on the copy stream.

    Attributes:
        storages: its memory.
        home: the stream that the memory was allocated on, and returns to. None: the backend has no streams.
        event: after which the bytes are there.
        job: of the courier, which gives the event when it is done. None: the event is there already.
    """

    storages: dict[StorageGroup, torch.UntypedStorage]
    home: Any = None
    event: Any = None
    job: Future[Any] | None = None

    def set_out(self) -> None:
        """Wait until all of it is on the copy stream. Raises what went wrong with that."""
        if self.job is not None:
            self.event, self.job = self.job.result(), None

    def finish(self) -> None:
        """Nobody will use the layer: wait on the host, where memory that is copied from may be given up, too."""
        if self.job is not None and (failure := self.job.exception()) is not None:
            traceback.clear_frames(failure.__traceback__)  # or they keep the memory
        else:
            self.set_out()
            if self.event is not None:
                self.event.synchronize()
        self.storages = {}  # the courier may hold this object for a moment longer


class LayerwiseOffloadManager:
    """Streams the layers of one list: each is on the device only while it runs, and the next ones are on their way.

    The host store is the truth for a streamed weight. Weights that are reachable from outside one layer (ties, shared
    submodules) are not streamed; they are non-layer weights.

    Args:
        component: the module that owns the list.
        layer_name: dotted name of the list inside it.
        device: where the layers run.
        config: prefetch depth, resident layers and their layout.
        component_name: for reports and errors.
        budget: of pinned memory, shared with the other lists of the component; default: one of its own.
    """

    def __init__(
        self,
        component: nn.Module,
        layer_name: str,
        *,
        device: torch.device,
        config: OffloadConfig,
        component_name: str,
        budget: PinBudget | None = None,
    ) -> None:
        self.layer_name, self.component_name, self.device = layer_name, component_name, device
        layers = find_layers(component, layer_name)
        self._component = weakref.ref(component)
        self._layers = [weakref.ref(layer) for layer in layers]
        self._prefetch = layer_count(config.prefetch, len(layers))
        self.resident_layers = resident_layers(config, len(layers))
        self._groups: list[list[StorageGroup]] = [[] for _ in layers]
        self._loaded: dict[int, LoadedLayer] = {}
        self._staging, self._immutable = config.staging, config.immutable_weights
        self._budget = (budget or PinBudget(config.pin_memory)) if config.pin_memory else None
        self._mover: Transfer | None = None
        self._courier: ThreadPoolExecutor | None = None
        self._coming: dict[int, _Coming] = {}
        self._keep_all = False
        backend = backend_of(device)
        self._copy_stream = backend.Stream(device=device) if hasattr(backend, "Stream") else None
        self.adopt()
        self._hooks = [
            handle
            for index, layer in enumerate(layers)
            for handle in (
                layer.register_forward_pre_hook(_LayerHook(self, index, "_before"), prepend=True),
                layer.register_forward_hook(_LayerHook(self, index, "_after")),
            )
        ]

    def __len__(self) -> int:
        return len(self._layers)

    def adopt(self) -> None:
        """Take the weights of the layers off the device and into the host store, new ones too."""
        if (component := self._component()) is None:
            return
        with moving:
            found = survey(component, self.component_name)
            new = self._unknown(found)
            if here := {*new.values()} & {*self._loaded, *self._coming}:
                for index in here:
                    self.release_layer(index)  # it would count as loaded without them
                found = survey(component, self.component_name)
                new = self._unknown(found)
            arrivals = {group: storage for group, storage in found.resident.items() if group in new}
            with parked_in_place(arrivals, self.device, found.wrappers):
                pass
            for group, index in new.items():
                self._take(group, index)
            if self._budget is not None:
                pin(new, self._budget, self.component_name)

    def _unknown(self, found: Survey) -> dict[StorageGroup, int]:
        """The groups that lie within one layer altogether and are not in the host store, with the layer's index."""
        layer_of = {id(m): i for i, ref in enumerate(self._layers) if (layer := ref()) for m in layer.modules()}
        unknown = {}
        for group, owners in found.owners.items():
            index, *others = {layer_of.get(id(owner)) for owner in owners}
            if others or index is None or group in self._groups[index]:
                continue
            if group.state is GroupState.PARKED or not (group.streamed or group in found.buffers):
                unknown[group] = index
        return unknown

    def _take(self, group: StorageGroup, index: int) -> None:
        group.streamed, group.load = True, _LayerHook(self, index, "_demand")
        self._groups[index].append(group)

    # -- load and release ----------------------------------------------------------------------------------------------

    def prefetch_layer(self, index: int, non_blocking: bool = True) -> None:
        """Start bringing a layer to the device. With ``non_blocking=False`` it is there on return."""
        with moving:
            try:
                if index not in self._loaded and index not in self._coming:
                    self._coming[index] = self._start(self._groups[index])
                if not non_blocking:
                    self._arrive(index)
            except BaseException as failure:
                traceback.clear_frames(failure.__traceback__)  # whoever keeps the error keeps no memory with it
                raise

    def release_layer(self, index: int) -> None:
        """Take a layer off the device. What was written to its weights there reaches the host store first."""
        with moving:
            if (coming := self._coming.pop(index, None)) is not None:
                coming.finish()
            if (loaded := self._loaded.get(index)) is not None:
                self._hand_back(loaded.home)
                for group in loaded.leave():
                    self._take(group, index)
                del self._loaded[index]

    def release_all(self) -> None:
        """Take every layer off the device, resident ones too."""
        with moving:
            for index in {*self._loaded, *self._coming}:
                self.release_layer(index)
            self._keep_all, self._mover, self._courier = False, None, None

    def load_all_layers(self) -> None:
        """Bring every layer to the device and keep it there until :meth:`release_all`."""
        with moving:
            before, self._keep_all = self._keep_all, True
            try:
                for index in range(len(self)):
                    self.prefetch_layer(index, non_blocking=False)
            except BaseException:
                self._keep_all = before
                raise

    def prepare_for_next_req(self) -> None:
        """Load the resident layers, and start the first streamed ones."""
        for index in self.resident_layers:
            self.prefetch_layer(index)
        self._prefetch_after(len(self) - 1)

    def remove(self) -> None:
        """Take the hooks off. The weights stay where they are, and the manager does nothing from now on."""
        for handle in self._hooks:
            handle.remove()
        for coming in self._coming.values():
            coming.finish()
        for loaded in self._loaded.values():
            loaded.stay()
        for groups in self._groups:
            for group in groups:
                group.streamed, group.load = False, None
            groups.clear()
        self._loaded.clear()
        self._coming.clear()

    # -- around the forward of a layer ---------------------------------------------------------------------------------

    def _before(self, index: int) -> None:
        with moving:
            self.prefetch_layer(index, non_blocking=False)  # on demand, if nobody foresaw it
            ahead = self._ahead(index)
            for stale in {*self._loaded, *self._coming} - {index, *ahead, *self.resident_layers}:
                self._after(stale)  # foreseen, but skipped
            self._prefetch_after(index)

    def _after(self, index: int) -> None:
        if not self._stays(index):
            self.release_layer(index)

    def _demand(self, index: int) -> None:
        """A weight is used apart from the forward of its layer. It goes when another layer runs, or with all."""
        with moving:
            self.prefetch_layer(index, non_blocking=False)
            layer = self._layers[index]()
            if layer is not None and any(is_parked(part.tensor) for m in owned_tensors(layer) for part in m.parts()):
                self.adopt()  # it was converted since
                self.prefetch_layer(index, non_blocking=False)

    def _ahead(self, index: int) -> list[int]:
        """The streamed layers that run next; after the last one the first one, for the next step."""
        order = [(index + step) % len(self) for step in range(1, len(self))]
        return [i for i in order if i not in self.resident_layers][: self._prefetch]

    def _prefetch_after(self, index: int) -> None:
        try:
            for ahead in self._ahead(index):
                self.prefetch_layer(ahead)
        except torch.OutOfMemoryError:
            pass  # looking ahead is a favour; a layer that is needed is loaded on demand, and that may raise

    # -- the copy stream -----------------------------------------------------------------------------------------------

    def _start(self, groups: list[StorageGroup]) -> _Coming:
        """Allocate on the current stream, which will use and free the memory; copy on the copy stream."""
        groups = [group for group in groups if group.state is GroupState.PARKED]
        targets = [torch.empty(group.nbytes, dtype=torch.uint8, device=self.device) for group in groups]
        coming = _Coming({group: target.untyped_storage() for group, target in zip(groups, targets, strict=True)})
        for group in groups:
            group.exposed = False
        if self._copy_stream is None:
            self._copy(coming.storages)
            return coming
        coming.home = backend_of(self.device).current_stream(self.device)
        self._copy_stream.wait_stream(coming.home)  # for earlier users of the same memory
        if not worth_staging(sum(g.nbytes for g in groups if g.host is not None and g.host.kind != "pinned")):
            coming.event = self._bring(coming)
            return coming
        self._courier = self._courier or ThreadPoolExecutor(1, thread_name_prefix="courier")
        coming.job = self._courier.submit(self._bring, coming)
        return coming

    def _bring(self, coming: _Coming) -> Any:
        """Put the copies on the copy stream; gives the event after which the bytes are there.

        What is in pageable memory is copied by the host, or even read from a file, before the device can have it. So
        the courier, a thread of the manager, does this for large layers, while the caller gives the device more to do.
        """
        assert self._copy_stream is not None
        try:
            with backend_of(self.device).stream(self._copy_stream):
                self._copy(coming.storages)
                return self._copy_stream.record_event()
        except BaseException:
            self._copy_stream.synchronize()  # what did start
            raise

    def _copy(self, storages: dict[StorageGroup, torch.UntypedStorage]) -> None:
        for group, storage in storages.items():
            if group.host is not None and group.host.kind == "pinned":
                bytes_of(storage).copy_(bytes_of(group.host.storage), non_blocking=True)
            else:  # a pageable source is never read asynchronously
                if self._mover is None:
                    largest = max(group.nbytes for groups in self._groups for group in groups)
                    self._mover = transfer(self.device, largest, staged=self._staging)
                self._mover.fill(bytes_of(storage), group)

    def _arrive(self, index: int) -> None:
        """The current stream waits for the copy, and the weights appear."""
        if (coming := self._coming.get(index)) is None:
            return
        try:
            coming.set_out()
        finally:
            if coming.job is None or coming.job.done():  # or the wait was interrupted, and it is still on its way
                del self._coming[index]
        self._wait_for(coming)
        storages, coming.storages = coming.storages, {}  # the courier may hold the object for a moment longer
        for group, storage in storages.items():
            if group.exposed:  # perhaps it was written to under the copy
                Transfer().fill(bytes_of(storage), group)
        self._loaded[index] = LoadedLayer(storages, coming.home, immutable=self._immutable)

    def _stays(self, index: int) -> bool:
        return self._keep_all or index in self.resident_layers

    def _wait_for(self, coming: _Coming) -> None:
        if coming.event is not None:
            backend_of(self.device).current_stream(self.device).wait_event(coming.event)

    def _hand_back(self, home: Any) -> None:
        """Memory returns to the stream it came from, whose next work must not meet what is still running here."""
        if home is not None and home != (here := backend_of(self.device).current_stream(self.device)):
            home.wait_stream(here)


class _LayerHook:
    """Calls a method of the manager around the forward of one layer. Its copy, in a copy of the layer, does nothing."""

    def __init__(self, manager: LayerwiseOffloadManager | None, index: int, method: str) -> None:
        self._manager = (lambda: None) if manager is None else weakref.ref(manager)
        self._index, self._method = index, method

    def __call__(self, *_: Any) -> None:
        if (manager := self._manager()) is not None:
            untraced(getattr(manager, self._method), self._index)

    def __deepcopy__(self, _memo: dict[int, Any]) -> _LayerHook:
        return _LayerHook(None, self._index, self._method)

    def __reduce__(self) -> tuple[type, tuple[None, int, str]]:
        return _LayerHook, (None, self._index, self._method)
