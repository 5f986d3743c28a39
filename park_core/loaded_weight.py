"""A streamed weight while it is on the device: it notes that somebody took its ``.data``.

Layers come and go with each forward, so there is no time to look for changes in their bytes. An in-place operation
moves the version counter of the weight, whoever does it; only a write through ``.data`` leaves no trace. So the weight
changes its class while it is loaded, as a parked one does, and whoever takes ``.data`` is taken to have written.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from park_core.storage import StorageGroup, group_of

__all__ = ["unwatch", "watch"]


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


def watch(group: StorageGroup) -> None:
    """From now on ``group.exposed`` tells whether somebody took the ``.data`` of a parameter in the group."""
    for _, tensor in group.tensors():
        if isinstance(tensor, nn.Parameter):
            tensor.__class__ = _loaded_class(type(tensor))


def unwatch(group: StorageGroup) -> None:
    """The parameters are again what they were."""
    for _, tensor in group.tensors():
        _take_off(tensor)


def _take_off(tensor: Tensor) -> None:
    if isinstance(tensor, LoadedWeight):
        tensor.__class__ = type(tensor).__mro__[2]


@functools.cache
def _loaded_class(cls: type) -> type:
    return type(f"Loaded{cls.__name__}", (LoadedWeight, cls), {"__slots__": (), "__module__": cls.__module__})
