"""An exception in a hook of a backward: it is kept aside while torch's engine unwinds, and raised at its end.

A hook's exception passes through the engine as Python's pending error. On its way the engine asks for the current
stream, and so our device guard for its type, in a destructor: a call of Python while an error is pending fails, and a
destructor that fails ends the process. So the guard takes the error away before it answers. The engine then has nothing
to report, which shows as ``SystemError``, and is given the exception back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import graph

_native = graph._engine_run_backward
_fetch = ctypes.pythonapi.PyErr_Fetch
_fetch.restype = None
_release = ctypes.pythonapi.Py_DecRef
_release.restype = None

# Everything is made beforehand: as long as an error is pending hardly any call succeeds.
_pending = (ctypes.c_void_p * 3)()  # its type, value and traceback, each a reference that is ours
_places = [ctypes.c_void_p(ctypes.addressof(_pending) + number * ctypes.sizeof(ctypes.c_void_p)) for number in range(3)]
_of_type, _of_value, _of_traceback = _places
_kept: list[BaseException] = []


def keep_pending_error() -> None:
    """Take the pending error of this thread, if there is one."""
    _fetch(_of_type, _of_value, _of_traceback)
    if _pending[0]:
        kind, value, traceback = (_owned(reference) for reference in _pending)
        error = value if isinstance(value, BaseException) else kind(value)
        _kept.append(error.with_traceback(traceback))


def _owned(reference: int | None) -> Any:
    if reference is None:
        return None
    item = ctypes.cast(reference, ctypes.py_object)
    found = item.value
    _release(item)
    return found


def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
    _kept.clear()
    try:
        return _native(*args, **kwargs)
    except SystemError:
        if not _kept:
            raise
    raise _kept.pop()


def patches() -> Iterator[tuple[Any, str, Any]]:
    for owner in (graph, torch.autograd):
        yield owner, "_engine_run_backward", _engine_run_backward
