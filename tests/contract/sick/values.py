"""Sick in values and layout."""

from __future__ import annotations

import torch
from torch import nn

from .bank import sick
from .healthy import Group, Healthy, flat_bytes, view_like
from .parked import PARKED


@sick("c01_every", follows=["c12_an_update_reaches_parked"])
class LosesStrides(Healthy):
    """Brings a transposed or channels_last weight back contiguous."""

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        return [
            data.contiguous() if data.numel() * data.element_size() == data.untyped_storage().nbytes() else data
            for data in super().copy_in(parameters)
        ]


@sick("c01_every")
class TakesFloat8ForBytes(Healthy):
    """Saturates what is not a number format that it knows."""

    def copy_out(self, group: Group) -> list[torch.Tensor]:
        copies = super().copy_out(group)
        for copy in copies:
            if copy.dtype is torch.float8_e4m3fn:
                copy.copy_(copy.float().clamp(max=2))
        return copies


@sick("c01_every", follows=["c20_a_parked_module"])
class KeepsHalfTheBits(Healthy):
    """Halves what its host copies need: they are bfloat16."""

    def copy_out(self, group: Group) -> list[torch.Tensor]:
        copies = super().copy_out(group)
        for copy in copies:
            if copy.dtype is torch.float32:
                with torch.inference_mode(copy.is_inference()):
                    whole = flat_bytes(copy.untyped_storage(), copy.device).view(torch.float32)
                    whole.copy_(whole.bfloat16())
        return copies


@sick("c01_every", follows=["c12_an_update_reaches_parked", "c19_"])
class ConvertsCounters(Healthy):
    """Brings everything back as floating point, what a buffer counts too."""

    def restore(self) -> None:
        was_parked = bool(self.parked())
        super().restore()
        for module in self.module.modules() if was_parked else ():
            for buffer in module.buffers(recurse=False):
                if not buffer.is_floating_point():
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.data = buffer.double()


@sick("c01_every")
class TakesEmptyWeightsForTied(Healthy):
    """Tells ties by the address of the data, which is zero for everything that is empty."""

    def restore(self) -> None:
        super().restore()
        empty = [p for p in self.module.parameters() if not p.numel() and not self.streamer.owns(p)]
        for parameter in empty:
            parameter.data = empty[0].data


@sick("c01_the_output", follows=["c05_", "c07_", "c20_a_parked_module", "c21_", "c34_", "c38_"])
class ComesBackInTrainingMode(Healthy):
    """Rebuilds the module's state on restore, and leaves it in training mode."""

    def restore(self) -> None:
        was_parked = bool(self.parked())
        super().restore()
        if was_parked:
            self.module.train()


@sick("c01_a_compiled")
class MakesAClassPerRestore(Healthy):
    """Brings parameters back in a class that it makes anew each time."""

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        super().swap_in(parameter, data)
        parameter.__class__ = type("Parameter", (nn.Parameter,), {})


@sick("c02_", follows=["c01_every", "c20_a_parked_module"])
class TellsPlaceholdersByTheirShape(Healthy):
    """A weight of one element looks like a placeholder, so no copy of it is made."""

    def copy_out(self, group: Group) -> list[torch.Tensor]:
        copies = super().copy_out(group)
        for copy in copies:
            if copy.numel() == 1:
                copy.zero_()
        return copies


@sick("c03_")
class MaterialisesExpandedViews(Healthy):
    """Gives every element of a view a byte of its own on the way back."""

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        moved = []
        for data in super().copy_in(parameters):
            flat = flat_bytes(data.untyped_storage(), data.device)
            dense = data.numel() * data.element_size()
            if dense > len(flat):
                larger = torch.zeros(dense, dtype=torch.uint8, device=data.device)
                larger[: len(flat)] = flat
                moved.append(view_like(larger, data))
            else:
                moved.append(data)
        return moved


@sick("c03_")
class CopiesElementByElement(Healthy):
    """Makes a host copy of every element that a view shows, also where they are the same bytes."""

    def swap_out(self, group: Group, copies: list[torch.Tensor]) -> None:
        super().swap_out(group, copies)
        for _, parameter in group:
            host = PARKED[parameter]
            if host.numel() * host.element_size() > host.untyped_storage().nbytes():
                host.dense = host.contiguous()


@sick("c03_", "c36_", follows=["c31_the_counted"])
class KeepsTwoCopies(Healthy):
    """Stages its host copies, and keeps what it staged them in."""

    def move_out(self, groups: list[Group]) -> None:
        super().move_out(groups)
        copies = {PARKED[parameter].untyped_storage()._cdata: PARKED[parameter] for parameter in self.parked()}
        self.staged = [flat_bytes(copy.untyped_storage(), copy.device).clone() for copy in copies.values()]

    def move_in(self, parked: list[nn.Parameter]) -> None:
        super().move_in(parked)
        self.staged = []


@sick("c01_every")
class KnowsOneDtype(Healthy):
    """Brings back with one wrong bit what is not float32."""

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        moved = super().copy_in(parameters)
        for data in moved:
            if data.dtype is not torch.float32:
                flat_bytes(data.untyped_storage(), self.device)[:1].bitwise_xor_(1)
        return moved


@sick("c01_every", follows=["c03_", "c04_"])
class CompactsViews(Healthy):
    """Brings back the elements of a view, one after the other, and not the storage that it lies in."""

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        moved = []
        for data in super().copy_in(parameters):
            is_view = data.numel() * data.element_size() != data.untyped_storage().nbytes()
            moved.append(data.clone(memory_format=torch.contiguous_format) if is_view else data)
        return moved


@sick("c04_")
class MovesWeightsFromUnderBuffers(Healthy):
    """Does not see that a buffer lies over a weight."""

    def reason_to_skip(self, parameter: nn.Parameter, buffers: dict[int, str]) -> str:
        return super().reason_to_skip(parameter, {})


@sick("c04_")
class SeversSharedStorages(Healthy):
    """Brings every parameter back into a storage of its own."""

    def copy_in(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        return [data for parameter in parameters for data in super(SeversSharedStorages, self).copy_in([parameter])]
