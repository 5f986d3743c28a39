"""``tensor.data = value`` where one of the two is on the fake device.

torch allows the assignment between any two of its own dense back ends (``TensorImpl::has_compatible_shallow_copy_type``
lists them); a back end from outside is not in that list. Here both change their insides instead, which keeps the
object, its weak references, hooks and gradient, as the assignment between CPU and CUDA does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

_native: Any = vars(torch._C.TensorBase)["data"]
_swap_insides = torch._C._swap_tensor_impl
_natively_compatible = torch._has_compatible_shallow_copy_type


def patches() -> Iterator[tuple[Any, str, Any]]:
    yield torch.Tensor, "data", property(_get, _set)
    yield torch, "_has_compatible_shallow_copy_type", _has_compatible_shallow_copy_type


def _get(self: torch.Tensor) -> torch.Tensor:
    data: torch.Tensor = _native.__get__(self)
    return data


def _set(self: torch.Tensor, value: torch.Tensor) -> None:
    if has_torch_function_unary(self):  # a subclass is asked first, as torch's own setter does
        handle_torch_function(_setter(), (self,), self, value)
        return
    with torch._C.DisableTorchFunctionSubclass():
        _assign(self, value)


def _setter() -> Any:
    return torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _assign(self: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor) or "fakegpu" not in (self.device.type, value.device.type):
        _native.__set__(self, value)
        return
    if _natively_compatible(self, value):
        _native.__set__(self, value)
        return
    requires_grad, grad = self.requires_grad, self.grad
    if requires_grad and not (value.is_floating_point() or value.is_complex()):
        raise RuntimeError("data set to a tensor that requires gradients must be floating point or complex dtype")
    if grad is not None and grad.shape != value.shape:
        raise NotImplementedError(
            f"fakegpu cannot assign .data of shape {tuple(value.shape)} across devices where the gradient has shape"
            f" {tuple(grad.shape)}; set .grad to None first"
        )
    hooks = self._backward_hooks
    with torch.inference_mode(value.is_inference()):
        _swap_insides(self, _get(value))  # and not detach(), which is a view of value
        if requires_grad:
            self.requires_grad_(True)
    if hooks:
        self._backward_hooks = hooks
    if grad is not None:
        # between CPU and CUDA the gradient stays where it was until its own .data is assigned, as Module.to does next;
        # torch lets a gradient be set only on the device of its tensor, so here it moves along
        self.grad = grad.to(device=value.device, dtype=value.dtype)


# dynamo compares the parameter names with those of the original
def _has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:
    if "fakegpu" in (input.device.type, from_.device.type):
        return True
    return bool(_natively_compatible(input, from_))
