"""Bringing weights under our care that are still on the host: a component on the host is a parked component."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from park_core.host_copy import HostCopy
from park_core.mapping import Mappings
from park_core.parked_tensor import hide, show
from park_core.storage import StorageGroup, settle, unsettle
from park_core.survey import Survey, viewed_elsewhere
from park_core.transfer import Transfer, synchronize
from park_core.wrappers import follow_inner_tensors

__all__ = ["parked_in_place", "placed"]


@contextmanager
def placed(found: Survey, device: torch.device | None) -> Iterator[list[StorageGroup]]:
    """The resident groups that are on the host although they belong on ``device``, as parked groups.

    What the body does not bring to the device is on the host again afterwards, as it was.
    """
    if device is None or device.type == "cpu" or any(group.moved for group in found.resident):
        yield []
        return
    arrivals = {g: s for g, s in found.resident.items() if g.device.type == "cpu" and not g.streamed}
    with parked_in_place(arrivals, device, found.wrappers):
        yield list(arrivals)


@contextmanager
def parked_in_place(
    groups: dict[StorageGroup, torch.UntypedStorage], device: torch.device, wrappers: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Make resident groups parked groups of ``device``; if the body fails, all of it is undone.

    A group on the host keeps its bytes where they are: its storage becomes the host copy, and stays mapped if it was
    mapped from the checkpoint. Where a tensor of somebody else views these bytes it gets a copy of its own, since a
    host copy shares memory with no live tensor. ``wrappers`` are what the component has of them.
    """
    if not groups:
        yield
        return
    before = {group: group.device for group in groups}
    mover = Transfer()
    mappings = Mappings()
    for busy in {group.device for group in groups if group.device.type != "cpu"}:
        synchronize(busy)  # a side stream may still read what is about to be freed
    try:
        for group, storage in groups.items():
            on_host = group.device.type == "cpu"
            adopt = on_host and not viewed_elsewhere(group, storage)
            group.host = HostCopy.adopted(storage, mappings) if adopt else mover.to_host(group, storage)
            group.device = device if on_host else group.device
            if adopt:
                unsettle(storage)
        for group in groups:
            hide(group)
        for wrapper in wrappers:
            follow_inner_tensors(wrapper)
        yield
    except BaseException:
        for group, storage in groups.items():
            group.device = before[group]
            show(group, storage)
            settle(group, storage)
            group.host = None
        for wrapper in wrappers:
            follow_inner_tensors(wrapper)
        raise
