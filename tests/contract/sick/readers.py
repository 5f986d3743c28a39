"""Sick where others read, load, copy, convert or compute with a parked module."""

from __future__ import annotations

import signal
from typing import Any, ClassVar

import torch
from torch import nn

from .bank import sick
from .healthy import HasPlaceholders, Healthy
from .parked import PARKED, Parked, ParkedError, name_of


class _ShowsPlaceholders(Parked):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(function) in ("numel", "detach"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


@sick("c16_")
class ShowsPlaceholders(Healthy):
    """Who reads a parked weight gets its placeholder."""

    disguise_as = _ShowsPlaceholders


class _HasTheShapeOfAPlaceholder(Parked):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = name_of(function)
        if what == "shape":
            return torch.Size([0])
        if what == "copy_" and args[1].numel() == 0:
            return args[0]
        return super().__torch_function__(function, types, args, kwargs)


@sick("c17_a_checkpoint")
class LoadsACheckpointOfPlaceholders(Healthy):
    """While parked the weights have the placeholders' shape, so that a checkpoint saved while parked fits."""

    disguise_as = _HasTheShapeOfAPlaceholder


class _CopiesPlaceholders(Parked):
    def __deepcopy__(self, memo: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(torch.empty(0, device=self.device))


@sick("c18_")
class CopiesPlaceholders(Healthy):
    """A deep copy of a parked module is made of placeholders."""

    disguise_as = _CopiesPlaceholders


class _PicklesPlaceholders(Parked):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (torch.empty(0),)


@sick("c18_")
class PicklesPlaceholders(Healthy):
    """What is saved of a parked module are placeholders."""

    disguise_as = _PicklesPlaceholders


class _WithMethods(Healthy):
    """Gives the parameters odd *methods*, also while they are resident."""

    methods: ClassVar[dict[str, Any]]

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        for parameter in module.parameters():
            kind = type(parameter)
            parameter.__class__ = type(kind.__name__, (kind,), self.methods)


@sick("c18_")
class PicklesItsHostCopies(_WithMethods):
    """What is saved of a module are its host copies, and after a restore there are none."""

    methods: ClassVar[dict[str, Any]] = {"__reduce_ex__": _PicklesPlaceholders.__reduce_ex__}


@sick("c18_")
class SharesWithItsCopy(_WithMethods):
    """A deep copy of the module has the same parameters as the original."""

    methods: ClassVar[dict[str, Any]] = {"__deepcopy__": lambda self, memo: self}


@sick("c19_")
class ConvertsBuffersOnly(Healthy):
    """A conversion while parked reaches the resident buffers; the weights come back as they were."""

    def guard(self) -> None:
        super().guard()
        for module in self.module.modules():

            def convert(function: Any, recurse: bool = True, module: nn.Module = module) -> nn.Module:
                for owner in module.modules():
                    for name, buffer in owner.named_buffers(recurse=False):
                        owner.register_buffer(name, function(buffer))
                return module

            module.__dict__["_apply"] = convert


class Permeable(Parked):
    """Lets operations through to the placeholder."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(function, types, args, kwargs)
        except ParkedError:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))


@sick("c20_a_parked_module", crashes=True)
class GuardsTheComponentOnly(Healthy):
    """Refuses the component's own forward; its submodules compute with placeholders."""

    disguise_as = Permeable

    def guard(self) -> None:
        super().guard()
        for hook in self.hooks:
            hook.remove()
        self.hooks = [self.module.register_forward_pre_hook(self._refuse, prepend=True)]

    def _refuse(self, *args: Any) -> None:
        raise RuntimeError("the component is parked: call restore() first")


@sick("c20_a_parked_module", "c20_a_forward", follows=["c38_"], crashes=True)
class GuardsNothing(HasPlaceholders):
    """Nothing is refused: kernels get placeholders of one element, made before they are needed."""

    disguise_as = Permeable

    def guard(self) -> None:
        super().guard()
        for hook in self.hooks:
            hook.remove()

    def placeholder(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.placeholder_of_one(parameter)


@sick("c20_a_parked_module")
class RaisesTheErrorOfTheShape(Healthy):
    """Refuses, but with an error about shapes that says nothing about parking."""

    def guard(self) -> None:
        super().guard()
        for hook in self.hooks:
            hook.remove()
        self.hooks = [
            module.register_forward_pre_hook(self._complain, prepend=True)
            for module in self.module.modules()
            if any(parameter in PARKED for parameter in module.parameters(recurse=False))
        ]

    def _complain(self, module: nn.Module, args: Any) -> None:
        if any(parameter in PARKED for parameter in module.parameters(recurse=False)):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x16 and 0x0)")


class _Crashes(Parked):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(function) == "linear":
            signal.raise_signal(signal.SIGSEGV)
        return super().__torch_function__(function, types, args, kwargs)


@sick("c20_a_parked_module", "c20_a_forward", follows=["c07_", "c38_"], crashes=True)
class CrashesOnPlaceholders(Healthy):
    """Nothing is refused, and a kernel that checks no shapes reads past a placeholder without elements."""

    disguise_as = _Crashes

    def guard(self) -> None:
        super().guard()
        for hook in self.hooks:
            hook.remove()
