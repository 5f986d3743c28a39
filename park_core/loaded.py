"""A layer while it is on the device: what is written to its weights there is in the host store when it leaves.

Layers come and go with each forward, so there is no time to look for changes in their bytes. An in-place operation
moves the version counter of a weight, whoever does it; only a write through ``.data`` leaves no trace. So a weight
changes its class while it is loaded, as a parked one does, and whoever takes ``.data`` is taken to have written.

Of some weights the counter tells nothing: inference tensors have none, and what a wrapper does to its inner tensors
moves the wrapper's own. There fingerprints are compared, which takes a look at the bytes, and a wait for the device, at
the end of each layer. Who never writes saves that with ``immutable_weights``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from park_core.fingerprint import Fingerprint, known_fingerprints
from park_core.parked_tensor import hide, is_parked, parked_class, show
from park_core.storage import StorageGroup, View, bytes_of, group_of
from park_core.survey import other_holders
from park_core.transfer import Transfer
from park_core.wrappers import swap_contents

__all__ = ["LoadedLayer"]


class LoadedLayer:
    """The groups of a layer on the device. To make it is to show the weights.

    Args:
        storages: the groups, with the memory that their bytes are in.
        home: the stream that the memory was allocated on, and returns to; None if the backend has no streams.
        immutable: nobody writes to the weights, so that nothing need be noticed.
    """

    def __init__(self, storages: dict[StorageGroup, torch.UntypedStorage], home: Any, *, immutable: bool) -> None:
        self.home, self._immutable = home, immutable
        unknown = [] if immutable else [g for g in storages if not _counted(g) and g.host and not g.host.fingerprint]
        found = known_fingerprints([bytes_of(storages[group]) for group in unknown])
        for group, fingerprint in zip(unknown, found, strict=True):
            group.host.fingerprint = fingerprint  # type: ignore[union-attr]
        for group, storage in storages.items():
            show(group, storage)
            group.exposed = False
            if not immutable and _counted(group):
                _watch(group)
        self._versions = {group: _versions(group) for group in storages}

    def leave(self) -> list[StorageGroup]:
        """Park the weights. If the host has no room for what was written, that raises, and the layer stays.

        Returns:
            The weights that were given other data, which are groups of their own now.
        """
        parted = self._save()
        for group in [*self._versions, *parted]:
            _unwatch(group)
            _leave_to_autograd(group)
            hide(group)
        return parted

    def stay(self) -> None:
        """The layer is no longer streamed: its weights are what they were."""
        for group in self._versions:
            _unwatch(group)

    def _save(self) -> list[StorageGroup]:
        """Bring to the host what was written on the device, then part from the groups what got other data."""
        storages: dict[StorageGroup, torch.UntypedStorage] = {}
        parted: list[tuple[StorageGroup, View, StorageGroup]] = []
        elsewhere: list[tuple[StorageGroup, View, Tensor]] = []
        for group in self._versions:
            for view, tensor in group.tensors():
                storage = tensor.untyped_storage()
                if is_parked(tensor):  # it got other data, and was parked with that as a non-layer weight
                    elsewhere.append((group, view, tensor))
                elif group_of(storage) is group:
                    storages[group] = storage
                else:
                    views = [View.of(tensor, view.name, view.inner)]
                    own = StorageGroup(group.component, storage.device, storage.nbytes(), views=views)
                    own.host = Transfer().to_host(own, storage)
                    parted.append((group, view, own))
        for group, fingerprint in self._written(storages).items():
            group.host = Transfer().to_host(group, storages[group], into=group.host)
            group.host.fingerprint = fingerprint
        for group, view, own in parted:
            group.views.remove(view)
            own.device = group.device
        for group, view, tensor in elsewhere:
            group.views.remove(view)
            _take_off(tensor)
        return [own for _, _, own in parted]

    def _written(self, storages: dict[StorageGroup, torch.UntypedStorage]) -> dict[StorageGroup, Fingerprint | None]:
        """The groups that were written to, each with its fingerprint now, if that had to be taken."""
        written: dict[StorageGroup, Fingerprint | None] = {}
        untold = []
        for group in storages:
            if group.exposed or self._versions[group] != _versions(group):
                written[group] = None
            elif not _counted(group) and not self._immutable:
                untold.append(group)
        found = known_fingerprints([bytes_of(storages[group]) for group in untold])
        for group, fingerprint in zip(untold, found, strict=True):
            assert group.host is not None
            if fingerprint is None or fingerprint != group.host.fingerprint:
                written |= {group: fingerprint}
        return written


def _counted(group: StorageGroup) -> bool:
    """Do the version counters tell of all in-place operations?"""
    return not any(view.inference or view.inner for view in group.views)


def _versions(group: StorageGroup) -> list[int]:
    return [tensor._version for _, tensor in group.tensors()] if _counted(group) else []


def _leave_to_autograd(group: StorageGroup) -> None:
    """A backward that is still to come keeps the bytes that it needs on its way to the inputs.

    For the weights that it trains there is no such way, since their gradients would not reach them. There torch raises
    its own error, as for weights that were changed.
    """
    for view, tensor in group.tensors():
        if view.inference or view.inner:
            continue
        if tensor.requires_grad:
            torch.autograd.graph.increment_version(tensor)
        elif other_holders(tensor):
            swap_contents(tensor, tensor.data)


class LoadedWeight(Tensor):
    """Mixed into the class of a parameter while it is loaded; see the module's docstring."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        if (group := group_of(self.untyped_storage())) is not None:
            group.exposed = True
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        twin: Tensor = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        _take_off(twin)
        return twin


def _watch(group: StorageGroup) -> None:
    """From now on ``group.exposed`` tells whether somebody took the ``.data`` of a parameter in the group."""
    for _, tensor in group.tensors():
        if isinstance(tensor, nn.Parameter):
            tensor.__class__ = _loaded_class(type(tensor))


def _unwatch(group: StorageGroup) -> None:
    """The parameters are again what they were."""
    for _, tensor in group.tensors():
        _take_off(tensor)


def _take_off(tensor: Tensor) -> None:
    if isinstance(tensor, LoadedWeight):
        order = type(tensor).__mro__
        plain = order[order.index(LoadedWeight) + 1]
        tensor.__class__ = parked_class(plain) if is_parked(tensor) else plain


@functools.cache
def _loaded_class(cls: type) -> type:
    made = type(f"Loaded{cls.__name__}", (LoadedWeight, cls), {"__slots__": (), "__module__": __name__})
    globals()[made.__name__] = made  # what torch.compile writes looks for the class where its name says
    return made
