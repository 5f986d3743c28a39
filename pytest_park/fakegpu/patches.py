"""What torch cannot be told through a registration is patched while a fake device is active, and put back after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MISSING = object()


@contextmanager
def applied() -> Iterator[None]:
    """All patches in place; undone in reverse order at the end, also after a failure."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, replacement in _patches():
            undo.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(undo):
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _patches() -> Iterator[tuple[Any, str, Any]]:
    yield torch.Tensor, "data", property(_get_data, _set_data)
    yield torch, "_has_compatible_shallow_copy_type", _has_compatible_shallow_copy_type


_native_data = torch._C.TensorBase.data  # type: ignore[attr-defined]
_native_compatible = torch._has_compatible_shallow_copy_type


def _get_data(self: torch.Tensor) -> torch.Tensor:
    return _native_data.__get__(self)  # type: ignore[no-any-return]


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value``: torch allows any pair of its own dense back ends; a back end from outside is not in that
    list (``TensorImpl::has_compatible_shallow_copy_type``), so pairs with a device tensor change their insides."""
    if not isinstance(value, torch.Tensor) or (self.device.type != "fakegpu" and value.device.type != "fakegpu"):
        _native_data.__set__(self, value)
        return
    if self.device.type == value.device.type and _native_compatible(self, value):
        _native_data.__set__(self, value)
        return
    requires_grad, grad = self.requires_grad, self.grad
    other = value.detach()
    if type(other) is not type(self) and isinstance(self, torch.nn.Parameter):
        other = other.view_as(other)
    torch._C._swap_tensor_impl(self, other)  # type: ignore[attr-defined]
    if requires_grad and not self.requires_grad:
        self.requires_grad_(True)
    if grad is not None:
        self.grad = None


def _has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
    # dynamo compares the parameter names with the original's
    if input.device.type == "fakegpu" or from_.device.type == "fakegpu":
        return True
    return bool(_native_compatible(input, from_))
