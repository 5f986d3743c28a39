"""Sick in updates: they lose what was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .bank import sick
from .healthy import Group, Healthy
from .parked import PARKED, Parked, name_of


class KeepsCopies(Healthy):
    """Keeps the host copies after restore, and uses them again for as long as `is_current` says so."""

    keeps_host_copies = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self.kept: dict[int, tuple[nn.Parameter, torch.Tensor, int]] = {}
        super().__init__(*args, **options)

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        copy = PARKED[parameter]
        super().swap_in(parameter, data)
        version = 0 if parameter.is_inference() else parameter._version
        self.kept[id(parameter)] = (parameter, copy, version)

    def copy_out(self, group: Group) -> list[torch.Tensor]:
        found = [self.kept.get(id(parameter)) for _, parameter in group]
        if all(one is not None and one[1].shape == one[0].shape and self.is_current(one) for one in found):
            return [one[1] for one in found if one is not None]
        return super().copy_out(group)

    def host_bytes(self) -> int:
        copies = [PARKED[parameter] for parameter in self.parked()] + [copy for _, copy, _ in self.kept.values()]
        return sum({copy.untyped_storage()._cdata: copy.untyped_storage().nbytes() for copy in copies}.values())

    def is_current(self, kept: tuple[nn.Parameter, torch.Tensor, int]) -> bool:
        parameter, copy, _ = kept
        return torch.equal(parameter.detach().cpu(), copy)

    def close(self) -> None:
        super().close()
        self.kept.clear()


@sick("c11_")
class UsesStaleCopies(KeepsCopies):
    """Never asks whether a copy is current."""

    def is_current(self, kept: tuple[nn.Parameter, torch.Tensor, int]) -> bool:
        return True


@sick("c11_")
class TrustsTheVersionCounter(KeepsCopies):
    """Takes a copy for current as long as the version counter stands, which writes through ``.data`` do not move."""

    def is_current(self, kept: tuple[nn.Parameter, torch.Tensor, int]) -> bool:
        parameter, _, version = kept
        return parameter.is_inference() or parameter._version == version


@sick("c11_")
class UsesCopiesOfReplacedParameters(KeepsCopies):
    """Finds the copies that it kept by name, and uses one for whatever has the name now."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.names: dict[int, str] = {}
        super().__init__(*args, **options)

    def swap_in(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        super().swap_in(parameter, data)
        self.names |= {id(mine): name for name, mine in self.module.named_parameters()}

    def copy_out(self, group: Group) -> list[torch.Tensor]:
        copies = super().copy_out(group)
        for (name, parameter), copy in zip(group, copies, strict=True):
            for old, kept, _ in self.kept.values():
                if self.names.get(id(old)) == name and old is not parameter and kept.shape == copy.shape:
                    copy.copy_(kept)
        return copies


@sick("c11_", follows=["c06_"])
class RestoresOverTheWeights(KeepsCopies):
    """A restore with nothing parked writes the kept copies back over the weights."""

    def restore(self) -> None:
        resident = [one for one in self.kept.values() if one[0] not in PARKED and one[0].shape == one[1].shape]
        super().restore()
        for parameter, copy, _ in resident:
            if parameter.requires_grad and parameter.grad is None:
                parameter.data.copy_(copy)


class _LosesWrites(Parked):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = name_of(function)
        if what in ("add_", "fill_", "copy_", "__setitem__"):
            return args[0]
        return super().__torch_function__(function, types, args, kwargs)


@sick("c12_a_write", "c17_loading")
class LosesWritesWhileParked(Healthy):
    """A write goes to a placeholder without elements: to nothing."""

    disguise_as = _LosesWrites


class _LosesDataWrites(Parked):
    @property
    def data(self) -> torch.Tensor:
        return torch.zeros_like(PARKED[self])

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        pass


@sick("c12_a_write")
class LosesWritesToDataWhileParked(Healthy):
    """A write to ``.data`` of a parked weight goes to a tensor that nobody keeps."""

    disguise_as = _LosesDataWrites


class _SharesWrites(Parked):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(function) == "fill_":
            for other in list(PARKED):
                if isinstance(other, _SharesWrites) and PARKED[other].is_floating_point():
                    PARKED[other].fill_(args[1])
            return args[0]
        return super().__torch_function__(function, types, args, kwargs)


@sick("c12_a_write")
class SharesAPlaceholderThatIsWrittenThrough(Healthy):
    """All weights of a dtype share one placeholder; what is written to one of them is written to all."""

    disguise_as = _SharesWrites


@sick("c12_an_update_reaches_parked")
class UpdatesPlaceholders(Healthy):
    """An update of a parked weight goes to its placeholder; it has the shape at least, so that nothing is refused."""

    def write(self, targets: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
        resident = {name for name in targets if self.module.get_parameter(name) not in PARKED}
        super().write({name: target for name, target in targets.items() if name in resident}, weights)


@sick("c12_an_update_reaches_parked")
class UpdatesWithOtherStrides(Healthy):
    """An update takes the place of the host copy, as contiguous as it came."""

    def write(self, targets: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
        super().write(targets, weights)
        for name in targets:
            if (parameter := self.module.get_parameter(name)) in PARKED:
                PARKED[parameter] = PARKED[parameter].contiguous()


@sick("c12_an_update_reaches_streamed")
class UpdatesStreamedPlaceholders(Healthy):
    """An update of a streamed weight goes to what it is between two uses, and not to the store."""

    def write(self, targets: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
        mine = {name for name in targets if not self.streamer.owns(self.module.get_parameter(name))}
        super().write({name: target for name, target in targets.items() if name in mine}, weights)


@sick("c12_an_update_that")
class UpdatesWithBroadcasting(Healthy):
    """Asks for no shapes: one value is copied to all elements."""

    def update(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.write({name: self.true_data(self.module.get_parameter(name)) for name in weights}, weights)


@sick("c12_an_update_that")
class UpdatesUntilOneDoesNotFit(Healthy):
    """Checks each shape when it comes to it: what came before is written."""

    def update(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            super().update({name: value})
