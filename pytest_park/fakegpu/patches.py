"""What torch cannot be told through a registration is patched while a fake device is active, and put back after."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils._device import _device_constructors

from . import (
    accelerator,
    autocast,
    backward,
    current_device,
    data_assignment,
    dlpack,
    pinned,
    random,
    storages,
    streams,
    without_data,
)

_MISSING = object()


def _all() -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, replacement) of every patch."""
    yield from chain(data_assignment.patches(), pinned.patches(), storages.patches(), accelerator.patches())
    yield from dlpack.patches()
    yield from autocast.patches()
    yield from backward.patches()
    yield from current_device.patches()
    yield from without_data.patches()
    yield torch, "Generator", random.AnyGenerator
    yield torch, "Stream", streams.AnyStream
    yield torch, "Event", streams.AnyEvent


@contextmanager
def applied() -> Iterator[None]:
    """All patches in place; undone in reverse order at the end, also after a failure."""
    _device_constructors()  # remembers torch's own factories at the first call: that must not be the patched ones
    _forget_dynamo_rules()
    with ExitStack() as undo:
        undo.callback(_forget_dynamo_rules)
        undo.callback(autocast.forget_casts)
        undo.callback(pinned.forget)
        undo.callback(pinned.kernels()._destroy)
        for owner, name, replacement in _all():
            undo.callback(_restore, owner, name, vars(owner).get(name, _MISSING))
            setattr(owner, name, replacement)
        yield


def _restore(owner: Any, name: str, original: Any) -> None:
    if original is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def _forget_dynamo_rules() -> None:
    """Dynamo remembers torch's functions by identity, and there are others in their places from here on."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map.cache_clear()
