"""Parking as this project does it: while a component is idle, its parameters *are* host tensors.

There is no placeholder. A parameter on the shelf has its real values, so that reading, saving, loading and writing work
as usual; only a forward is refused.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class OnShelfError(RuntimeError):
    """A component was used while its weights were on the host."""


@dataclass
class Shelved:
    """What a `Shelf.park` did: device bytes that came free, and what stayed, with the reason."""

    bytes_freed: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


class Shelf:
    """Takes the weights of one component to the host and back.

    *share* is how much of the free memory the weights must be worth before it takes the trouble.
    """

    def __init__(self, component: nn.Module, device: torch.device, share: float = 0.1) -> None:
        self.component = component
        self.device = device
        self.share = share
        self._away = WeakTensorKeyDictionary()
        self._guards: list[Any] = []
        self._lock = threading.RLock()

    def park(self, need: int = 0) -> Shelved:
        """To the host, if the weights are a good part of the free memory or *need* bytes would not fit beside them."""
        with self._lock:
            report = self._survey()
            groups = _by_storage(p for p in self.component.parameters() if self._can_park(p))
            size = sum(group[0].untyped_storage().nbytes() for group in groups)
            free = self._free()
            if not groups or (size <= self.share * free and need <= free):
                return report
            if any(parameter.grad is not None for group in groups for parameter in group):
                raise OnShelfError("a weight has a gradient; step or zero the gradients first")
            self._guard()
            try:
                copies = [_moved(group, torch.device("cpu")) for group in groups]
            except BaseException:
                if not len(self._away):
                    self._unguard()
                raise
            storages = [weakref.ref(group[0].untyped_storage()) for group in groups]
            sizes = [group[0].untyped_storage().nbytes() for group in groups]
            _assign(groups, copies)
            for parameter in (parameter for group in groups for parameter in group):
                self._away[parameter] = True
            names = {id(parameter): name for name, parameter in self.component.named_parameters()}
            for group, storage, nbytes in zip(groups, storages, sizes, strict=True):
                if storage() is None:
                    report.bytes_freed += nbytes
                else:
                    report.skipped += [(names[id(p)], "a tensor elsewhere holds its bytes") for p in group]
            return report

    def restore(self) -> None:
        """Back to the device; what has moved there by itself in the meantime stays as it is."""
        with self._lock:
            groups = _by_storage(p for p in self.component.parameters() if p in self._away and p.device != self.device)
            _assign(groups, [_moved(group, self.device) for group in groups])
            self._away.clear()
            self._unguard()

    def close(self) -> None:
        """Back to the device for good."""
        with self._lock:
            self.restore()
            self.share = float("inf")

    def size(self) -> int:
        """Bytes of the component's weights, wherever they are."""
        return sum(group[0].untyped_storage().nbytes() for group in _by_storage(self.component.parameters()))

    def _free(self) -> int:
        backend = torch.get_device_module(self.device)
        unused = backend.memory_reserved(self.device) - backend.memory_allocated(self.device)
        return int(backend.mem_get_info(self.device)[0] + unused)

    def _can_park(self, parameter: nn.Parameter) -> bool:
        return not _is_wrapper(parameter) and parameter.device == self.device and bool(parameter.numel())

    def _survey(self) -> Shelved:
        """What a park leaves on the device."""
        left = [(name, "a buffer") for name, _ in self.component.named_buffers()]
        for name, parameter in self.component.named_parameters():
            if _is_wrapper(parameter):
                left.append((name, f"a {type(parameter).__name__} wraps other tensors"))
            elif parameter.device != self.device and parameter not in self._away:
                left.append((name, f"on {parameter.device}"))
        for prefix, module in self.component.named_modules():
            tensors = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
            left += [(f"{prefix}.{name}".lstrip("."), "a plain attribute") for name in tensors]
        return Shelved(skipped=left)

    def _guard(self) -> None:
        self._unguard()
        self._guards = [m.register_forward_pre_hook(_refuse, prepend=True) for m in self.component.modules()]

    def _unguard(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards = []


def _refuse(module: nn.Module, arguments: Any) -> None:
    raise OnShelfError(f"weights of {type(module).__name__} are parked on the host: restore() them first")


def _is_wrapper(parameter: Tensor) -> bool:
    return hasattr(type(parameter), "__tensor_flatten__")


def _by_storage(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        if not _is_wrapper(parameter):
            groups.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    return list(groups.values())


def _moved(group: list[nn.Parameter], device: torch.device) -> list[Tensor]:
    """Tensors like these parameters over one new storage on the device."""
    storage = group[0].untyped_storage()
    with torch.inference_mode(group[0].is_inference()):
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy = flat.to(device, copy=True).untyped_storage()
        return [
            torch.empty(0, dtype=p.dtype, device=device).set_(copy, p.storage_offset(), p.shape, p.stride())
            for p in group
        ]


def _assign(groups: list[list[nn.Parameter]], values: list[list[Tensor]]) -> None:
    for group, tensors in zip(groups, values, strict=True):
        for parameter, tensor in zip(group, tensors, strict=True):
            parameter.data = tensor
