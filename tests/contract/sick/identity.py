"""Sick in the identity of parameters, in autograd, and in inference mode."""

from __future__ import annotations

import torch
from torch import nn

from .bank import sick
from .healthy import HasPlaceholders, Healthy, flat_bytes, view_like
from .parked import PARKED
from .readers import Permeable


@sick("c32_", follows=["c33_a_pending_backward", "c37_"])
class RebuildsParameters(Healthy):
    """Makes new parameters on restore."""

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        super().swap_in(parameter, data)
        for module in self.module.modules():
            for name, mine in list(module.named_parameters(recurse=False)):
                if mine is parameter:
                    with torch.inference_mode(parameter.is_inference()):
                        setattr(module, name, nn.Parameter(data, requires_grad=parameter.requires_grad))


@sick("c32_")
class DropsAttributes(Healthy):
    """Clears what others keep on the parameters."""

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        super().swap_in(parameter, data)
        parameter.__dict__.clear()


@sick("c32_", follows=["c01_a_compiled", "c33_a_pending_backward", "c34_"])
class ForgetsRequiresGrad(Healthy):
    """Brings parameters back frozen."""

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        super().swap_in(parameter, data)
        if parameter.requires_grad:
            parameter.requires_grad_(False)


@sick("c33_a_gradient")
class DropsGradients(Healthy):
    """Frees the gradients together with the weights, and never brings them back."""

    def refuse(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None


@sick("c33_a_pending_backward")
class RestoresInPlace(Healthy):
    """Writes the values into the parameter, which tells autograd that they have changed."""

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        super().swap_in(parameter, data)
        if parameter.requires_grad and not parameter.is_inference():
            with torch.no_grad():
                parameter.mul_(1)


@sick("c33_a_pending_backward", follows=["c38_"])
class HasPlaceholdersOfTheSameShape(HasPlaceholders):
    """Its placeholders have the shape of the weight over one zero, and a pending backward takes them for the weight."""

    disguise_as = Permeable

    def placeholder(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.placeholder_of_one(parameter).expand(1, *parameter.shape)[0]


@sick("c34_")
class SwapsOutsideInferenceMode(Healthy):
    """Makes the new data in whatever mode the caller is in."""

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        storages = {}
        for parameter in parameters:
            storage = PARKED[parameter].untyped_storage()
            storages[storage._cdata] = flat_bytes(storage, storage.device).to(self.device)
        return [view_like(storages[PARKED[p].untyped_storage()._cdata], PARKED[p]) for p in parameters]
