"""Registering the name ``fakegpu`` with torch: once per process, on first use, never undone.

torch reserves one back end, ``PrivateUse1``, for code outside its tree, and since 2.10 lets Python fill it in
(``torch.utils.backend_registration._setup_privateuseone_for_python_backend``). The registration cannot be taken back,
so it happens when the first fake device is activated, and what it registers follows whether one is active.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as _setup

from .backward import keep_pending_error

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "fakegpu"
#: The name torch gives the back end while nobody has claimed it.
UNCLAIMED = "privateuseone"

_BaseHooks, _BaseGuard = torch._C._acc.PrivateUse1Hooks, torch._C._acc.DeviceGuard
_registered: list[object] = []


def register(module: ModuleType, is_available: Callable[[], bool]) -> None:
    """Give torch the back end ``fakegpu`` with *module* as ``torch.fakegpu``; later calls do nothing.

    Raises ``RuntimeError`` when another package has claimed the one place that torch has for it.
    """
    if _registered:
        return
    claimed = torch._C._get_privateuse1_backend_name()
    if claimed != UNCLAIMED:
        raise RuntimeError(
            f"fakegpu cannot be activated: torch has one place for a back end from outside and {claimed!r} has taken it"
            " in this process; run the tests that use fakegpu in a process that does not import that package"
        )

    class Hooks(_BaseHooks):  # type: ignore[misc,valid-type]
        def is_available(self) -> bool:
            return is_available()

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, device_index: int) -> bool:
            return is_available()

    class Guard(_BaseGuard):  # type: ignore[misc,valid-type]
        def type_(self) -> object:
            keep_pending_error()
            return torch._C._autograd.DeviceType.PrivateUse1

    hooks, guard = Hooks(), Guard()
    _setup(NAME, backend_module=module, hook=hooks, device_guard=guard)
    _registered.extend((hooks, guard))  # torch keeps no reference of its own
