"""A small implementation of parking that keeps every promise: the sick ones beside it break one each.

How it works: while a parameter is parked, its class is a subclass with a ``__torch_function__`` that answers questions
and takes writes on the host copy and refuses everything else, so that no kernel can see the placeholder. The host copy
is a view with the shape, strides and offset of the weight over one host storage per device storage.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from pytest_park.contract import Parkable, Report

from .parked import PARKED, Parked, ParkedError, parked_class
from .streaming import Streamer

#: The parameters over one storage, with their names; something that was left alone, and why.
Group = list[tuple[str, nn.Parameter]]
Left = tuple[str, str]

LOCK = threading.RLock()
#: The components that are using a parameter, whoever parked it.
USERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Healthy:
    """Parks the non-layer weights of *module*. The small methods are there to be broken one at a time."""

    significance = 0.1
    keeps_host_copies = False
    lock: Any = LOCK
    disguise_as: type[Parked] = Parked

    def __init__(self, module: nn.Module, streamed: Sequence[str] = (), *, pinned: bool = False) -> None:
        self.module = module
        self.pinned = pinned
        self.device = next((p.device for p in module.parameters() if p.device.type != "cpu"), torch.device("cpu"))
        self.closed = False
        self.hooks: list[Any] = []
        self.streamer = Streamer(module, streamed)
        for parameter in module.parameters():
            USERS.setdefault(parameter, weakref.WeakSet()).add(self)

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def park(self, need: int | None = None) -> Report:
        """Free the weights' device bytes, if that is worth it. All or nothing; again is nothing."""
        with self.lock:
            if self.closed:
                return Report(bytes_freed=0)
            groups, skipped = self.plan()
            report = Report(bytes_freed=0, skipped=skipped)
            if self.worth_it(self.bytes_of(groups), need):
                self.refuse([p for group in groups for _, p in group])
                storages = [weakref.ref(group[0][1].untyped_storage()) for group in groups]
                sizes = [group[0][1].untyped_storage().nbytes() for group in groups]
                self.move_out(groups)
                self.guard()
                report = self.measured(groups, sizes, [ref() is not None for ref in storages], skipped)
            self.release()
            return report

    def move_out(self, groups: list[Group]) -> None:
        """Copy everything, then swap everything."""
        copies = [self.copy_out(group) for group in groups]
        for group, copy in zip(groups, copies, strict=True):
            self.swap_out(group, copy)

    def measured(self, groups: list[Group], sizes: list[int], held: list[bool], skipped: list[Left]) -> Report:
        for group, is_held in zip(groups, held, strict=True):
            skipped += [(name, "its bytes are held by a tensor elsewhere") for name, _ in group if is_held]
        freed = sum(size for size, is_held in zip(sizes, held, strict=True) if not is_held)
        return Report(bytes_freed=freed, skipped=skipped)

    def restore(self) -> None:
        """Bring everything back. All or nothing; again is nothing."""
        with self.lock:
            if self.closed:
                return
            self.move_in(self.parked())
            self.unguard()
            self.claim()

    def move_in(self, parked: list[nn.Parameter]) -> None:
        """Copy everything, then swap everything."""
        for parameter, data in zip(parked, self.copy_in(parked), strict=True):
            self.swap_in(parameter, data)

    def finish(self) -> None:
        """The end of a use, and of a request."""
        self.park()

    def close(self) -> None:
        """End parking for good: the module has its real weights and this object does nothing any more."""
        self.restore()
        self.closed = True

    def reconfigure(self) -> None:
        """Look at the module anew."""
        self.restore()
        self.claim()

    def update(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write new values into weights, wherever they are. All or nothing."""
        with self.lock:
            targets = {name: self.true_data(self.module.get_parameter(name)) for name in weights}
            for name, target in targets.items():
                if weights[name].shape != target.shape:
                    raise ParkedError(f"{name} has shape {list(target.shape)}, not {list(weights[name].shape)}")
            self.write(targets, weights)

    def write(self, targets: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            with torch.inference_mode(target.is_inference()):
                target.copy_(weights[name])

    def true_data(self, parameter: nn.Parameter) -> torch.Tensor:
        """Where the values of a weight are: in the store of the layers, in a host copy, or in the parameter."""
        if self.streamer.owns(parameter):
            return self.streamer.store[id(parameter)]
        return PARKED[parameter] if parameter in PARKED else parameter.detach()

    # -- which --------------------------------------------------------------------------------------------------------

    def plan(self) -> tuple[list[Group], list[Left]]:
        """Resident weights by storage, and what is left alone with the reason."""
        groups: dict[int, Group] = {}
        skipped = []
        buffers = {buffer.untyped_storage()._cdata: name for name, buffer in self.module.named_buffers()}
        for name, parameter in self.module.named_parameters():
            reason = self.reason_to_skip(parameter, buffers)
            if reason:
                skipped.append((name, reason))
            elif parameter not in PARKED and parameter.untyped_storage().nbytes():
                groups.setdefault(parameter.untyped_storage()._cdata, []).append((name, parameter))
        skipped += [(name, "a buffer") for name in buffers.values()]
        for prefix, module in self.module.named_modules():
            tensors = [name for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
            skipped += [(f"{prefix}.{name}".lstrip("."), "a plain tensor attribute") for name in tensors]
        return list(groups.values()), skipped

    def reason_to_skip(self, parameter: nn.Parameter, buffers: dict[int, str]) -> str:
        if self.streamer.owns(parameter):
            return "streamed"
        if hasattr(type(parameter), "__tensor_flatten__"):
            return "wraps other tensors"
        if parameter.device != self.device:
            return f"on {parameter.device}"
        if set(USERS.get(parameter, ())) - {self}:
            return "another component is using it"
        if parameter not in PARKED and parameter.untyped_storage()._cdata in buffers:
            return "a buffer lies over it"
        return ""

    def parked(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter in PARKED]

    def bytes_of(self, groups: list[Group]) -> int:
        return sum(group[0][1].untyped_storage().nbytes() for group in groups)

    def weight_bytes(self) -> int:
        """Device bytes of the weights, parked or not."""
        groups, _ = self.plan()
        hosts = {PARKED[p].untyped_storage()._cdata: PARKED[p].untyped_storage().nbytes() for p in self.parked()}
        return self.bytes_of(groups) + sum(hosts.values())

    def host_bytes(self) -> int:
        """Bytes of the host copies."""
        hosts = {PARKED[p].untyped_storage()._cdata: PARKED[p].untyped_storage().nbytes() for p in self.parked()}
        return sum(hosts.values())

    def release(self) -> None:
        for parameter in self.module.parameters():
            USERS.setdefault(parameter, weakref.WeakSet()).discard(self)

    def claim(self) -> None:
        for parameter in self.module.parameters():
            USERS.setdefault(parameter, weakref.WeakSet()).add(self)

    # -- whether ------------------------------------------------------------------------------------------------------

    def worth_it(self, size: int, need: int | None) -> bool:
        headroom = self.headroom() - self.fragments(size if need is None else need)
        return size > self.significance * headroom or (need is not None and headroom < need)

    def headroom(self) -> int:
        backend = torch.get_device_module(self.device)
        free, total = backend.mem_get_info(self.device)
        reserved = backend.memory_reserved(self.device)
        cap = round(backend.get_per_process_memory_fraction(self.device) * total)
        return max(0, min(free, cap - reserved)) + reserved - backend.memory_allocated(self.device)

    def fragments(self, request: int) -> int:
        """Free bytes in pieces that are too small for the request, in segments that are partly in use."""
        return sum(
            block["size"]
            for segment in torch.get_device_module(self.device).memory_snapshot()
            for block in segment["blocks"]
            if segment["device"] == self.device.index and block["state"] == "inactive"
            if block["size"] < min(request, segment["total_size"])
        )

    def refuse(self, parameters: list[nn.Parameter]) -> None:
        if any(parameter.grad is not None for parameter in parameters):
            raise ParkedError("a weight has a gradient: it cannot be parked")

    # -- how ----------------------------------------------------------------------------------------------------------

    def copy_out(self, group: Group) -> list[torch.Tensor]:
        """The host copies of the parameters over one storage: views over one host storage."""
        weights = [parameter.detach() for _, parameter in group]
        with torch.inference_mode(weights[0].is_inference()):
            flat = flat_bytes(weights[0].untyped_storage(), weights[0].device)
            if self.pinned:
                host = torch.empty_like(flat, device="cpu", pin_memory=True)
                host.copy_(flat)
            else:
                host = flat.to("cpu", copy=True)
            return [view_like(host, weight) for weight in weights]

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """Device tensors with the values of the host copies; what shares host bytes shares device bytes."""
        storages: dict[int, torch.Tensor] = {}
        moved = []
        for parameter in parameters:
            host = PARKED[parameter]
            with torch.inference_mode(parameter.is_inference()):
                key = host.untyped_storage()._cdata
                if key not in storages:
                    flat = flat_bytes(host.untyped_storage(), host.device)
                    storages[key] = torch.empty_like(flat, device=self.device)
                    storages[key].copy_(flat)
                moved.append(view_like(storages[key], host))
        return moved

    def placeholder(self, parameter: nn.Parameter) -> torch.Tensor:
        with torch.inference_mode(parameter.is_inference()):
            return torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def swap_out(self, group: Group, copies: list[torch.Tensor]) -> None:
        for (_, parameter), copy in zip(group, copies, strict=True):
            placeholder = self.placeholder(parameter)
            PARKED[parameter] = copy
            self.disguise(parameter)
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.data.__set__(parameter, placeholder)

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(parameter, data)
        self.undisguise(parameter)
        del PARKED[parameter]

    # -- protection ---------------------------------------------------------------------------------------------------

    def disguise(self, parameter: nn.Parameter) -> None:
        parameter.__class__ = parked_class(type(parameter), self.disguise_as)

    def undisguise(self, parameter: nn.Parameter) -> None:
        if isinstance(parameter, Parked):
            parameter.__class__ = type(parameter).kind

    def guard(self) -> None:
        """Refuse forwards of modules that own a parked weight, and conversions of the module, while parked."""
        self.unguard()
        for name, module in self.module.named_modules():
            module.__dict__["_apply"] = _refuse_conversion
            if any(parameter in PARKED for parameter in module.parameters(recurse=False)):
                self.hooks.append(module.register_forward_pre_hook(partial(_refuse_forward, name), prepend=True))

    def unguard(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        for module in self.module.modules():
            module.__dict__.pop("_apply", None)


class HasPlaceholders(Healthy):
    """Has placeholders of one element for its variants, made when memory is not scarce."""

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        self._placeholders: dict[Any, torch.Tensor] = {}
        for parameter in module.parameters():
            with torch.inference_mode(parameter.is_inference()):
                one = torch.zeros(1, dtype=parameter.dtype, device=self.device)
            self._placeholders[parameter.dtype, parameter.is_inference()] = one

    def placeholder_of_one(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._placeholders[parameter.dtype, parameter.is_inference()]


def parkable(
    implementation: type[Healthy], module: nn.Module, inputs: Any, streamed: Sequence[str] = (), **options: Any
) -> Parkable:
    """*module* as the contract sees it, parked by *implementation*."""
    parker = implementation(module, streamed, **options)
    return Parkable(
        module,
        inputs,
        park=parker.park,
        restore=parker.restore,
        streamed=streamed,
        adopt=lambda other, arguments, layers: parkable(implementation, other, arguments, layers, **options),
        significance=parker.significance,
        park_for=lambda need: parker.park(need),
        begin_use=parker.restore,
        finish_use=parker.finish,
        finish_request=parker.finish,
        weight_bytes=parker.weight_bytes,
        update=parker.update,
        host_bytes=parker.host_bytes,
        keeps_host_copies=parker.keeps_host_copies,
        ends={"close": parker.close},
        reconfigure=parker.reconfigure,
        pinned=parker.pinned,
    )


def flat_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """All bytes of a storage as one tensor."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def view_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The bytes in *flat* as a tensor with the dtype, shape, strides and offset of *like*."""
    empty = torch.empty(0, dtype=like.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def _refuse_conversion(*args: Any, **kwargs: Any) -> None:
    raise ParkedError("a parked module cannot be moved or converted: call restore() first")


def _refuse_forward(name: str, module: nn.Module, *args: Any) -> None:
    if any(parameter in PARKED for parameter in module.parameters(recurse=False)):
        raise ParkedError(f"weights of {name or 'the component'} are parked on the host: call restore() first")
