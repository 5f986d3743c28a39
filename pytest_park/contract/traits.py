"""Traits that promises are about: how to tell that a module has one, and a probe that has it.

A trait is looked for in the user's own module first; its probe is for parkables that can adopt a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .case import flat_tensors, streamed_parameters
from .parkable import Parkable
from .probes import Calculation, Probe, Stack, Weights, batch, filled, linear, plain, ramp
from .subclass import Pair, dtensor, is_dtensor, wraps_others


@dataclass(frozen=True, slots=True, eq=False)
class Trait:
    """Something that a module has or has not."""

    name: str
    found_in: Callable[[Parkable], bool]
    probe: Callable[[torch.device], Probe]


def weights_of(parkable: Parkable) -> list[torch.nn.Parameter]:
    """The weights that can be parked, each once: streamed layers may be placeholders, or views of a flat buffer."""
    streamed = {id(parameter) for parameter in streamed_parameters(parkable)}
    return [parameter for parameter in parkable.module.parameters() if id(parameter) not in streamed]


def never(parkable: Parkable) -> bool:
    """For what is always tried on the probe: too rare to be looked for, or worth a place of its own."""
    return False


def occupied(weight: torch.Tensor) -> int:
    """Bytes of the storage that the weight lies in, which other tensors may share."""
    return weight.untyped_storage().nbytes()


def any_weight(test: Callable[[torch.Tensor], bool]) -> Callable[[Parkable], bool]:
    return lambda parkable: any(test(parameter) for parameter in weights_of(parkable))


def _tied_modules(device: torch.device) -> Probe:
    embedding, head = filled(nn.Embedding(16, 16, device=device)), linear(16, 16, device, bias=False)
    head.register_parameter("weight", embedding.get_parameter("weight"))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.embedding.weight[: x.shape[0]]
        result: torch.Tensor = self.head(x + tokens)
        return result

    return Probe(Calculation(forward, embedding=embedding, head=head), batch(device))


def _several_names(parkable: Parkable) -> bool:
    named = [id(parameter) for _, parameter in parkable.module.named_parameters(remove_duplicate=False)]
    return any(named.count(id(parameter)) > 1 for parameter in weights_of(parkable))


def _shared(*, buffers: bool) -> Callable[[Parkable], bool]:
    def found(parkable: Parkable) -> bool:
        weights = [(id(w), w.untyped_storage().data_ptr()) for w in weights_of(parkable) if occupied(w)]
        addresses = [address for _, address in weights]
        if buffers:
            return any(b.untyped_storage().data_ptr() in addresses for b in parkable.module.buffers() if occupied(b))
        return len(set(addresses)) < len(addresses)

    return found


def _two_over_one_storage(device: torch.device) -> Probe:
    base = ramp(16, 16, device=device)
    return Probe(Weights(whole=base, same=base.view(8, 32), rows=base[4:12], other=base.clone()), batch(device))


def _buffer_over_weight(device: torch.device) -> Probe:
    base = ramp(16, 16, device=device)
    module = Weights(weight=base, other=base.clone())
    module.register_buffer("scale", base[0])
    return Probe(module, batch(device))


SHARING = {
    trait.name: trait
    for trait in (
        Trait("tied weights", _several_names, _tied_modules),
        Trait("weights over one storage", _shared(buffers=False), _two_over_one_storage),
        Trait("buffers over a weight's storage", _shared(buffers=True), _buffer_over_weight),
    )
}

SEVERAL_NAMES = SHARING["tied weights"]


def _stack(**options: Any) -> Callable[[torch.device], Probe]:
    return lambda device: Probe(Stack(device, **options), batch(device), ("blocks",))


STREAMED = Trait("streamed layers", lambda parkable: bool(parkable.streamed), _stack())
TIED_TO_STREAMED = {
    "the layers come first": Trait("weight of a layer tied to the head", never, _stack(tied=True)),
    "the head comes first": Trait("weight of a layer tied to the head", never, _stack(tied=True, head_first=True)),
}


def _subclass(device: torch.device) -> Probe:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = self.pair.first, self.pair.second
        result: torch.Tensor = self.plain(x) @ (first + second)
        return result

    pair = Pair(ramp(16, 16, device=device), ramp(16, 16, device=device).mul(2))
    return Probe(Calculation(forward, pair=pair, plain=linear(16, 16, device)), batch(device))


SUBCLASS = Trait("weights that wrap other tensors", any_weight(wraps_others), _subclass)


def _distributed(device: torch.device) -> Probe:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.plain(x) @ self.sharded.to_local()
        return result

    sharded = dtensor(ramp(16, 16, device=device))
    return Probe(Calculation(forward, sharded=sharded, plain=linear(16, 16, device)), batch(device))


DTENSOR = Trait("DTensor weights", any_weight(is_dtensor), _distributed)


def _both_kinds(parkable: Parkable) -> bool:
    return len({weight.is_inference() for weight in weights_of(parkable)}) == 2


def _inference(device: torch.device) -> Probe:
    with torch.inference_mode():
        inside = linear(16, 16, device)
    return Probe(nn.Sequential(inside, linear(16, 16, device)), batch(device))


def _inference_only(device: torch.device) -> Probe:
    with torch.inference_mode():
        return plain(device, width=16)


INFERENCE = Trait("inference weights beside normal ones", _both_kinds, _inference)
INFERENCE_ONLY = Trait(
    "inference weights only", lambda p: all(w.is_inference() for w in weights_of(p)), _inference_only
)


def _backward_runs(parkable: Parkable) -> bool:
    """Not where nothing requires a gradient, and not through layers that are streamed for inference only."""
    try:
        with torch.enable_grad():
            outputs = [tensor for tensor in flat_tensors(parkable.call()) if tensor.requires_grad]
            if outputs:
                torch.stack([output.float().sum() for output in outputs]).sum().backward()
    except RuntimeError:  # what autograd raises. Anything else is a fault of the module, and not for a trait to hide
        return False
    finally:
        parkable.module.zero_grad(set_to_none=True)
    return bool(outputs)


BACKWARD = Trait("a forward that a backward runs through", _backward_runs, plain)

# For arithmetic with bytes a module without ties and views is better than the user's own, where one can be had.
PLAIN = Trait("plain layers", lambda parkable: parkable.adopt is None, plain)


def _has_nested(parkable: Parkable) -> bool:
    prefixes = tuple(f"{name}." for name in parkable.streamed)
    names = [name for name, _ in parkable.module.named_parameters() if not prefixes or not name.startswith(prefixes)]
    return any("." in name for name in names)


def _has_bare(parkable: Parkable) -> bool:
    mine = set(weights_of(parkable))
    owners = (module for module in parkable.module.modules() if any(True for _ in module.children()))
    return any(parameter in mine for owner in owners for parameter in owner.parameters(recurse=False))


def _with_token(device: torch.device) -> Probe:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x + self.token)
        return result

    return Probe(Calculation(forward, token=ramp(16, device=device), layer=linear(16, 16, device)), batch(device))


BARE = Trait("parameters beside layers in one module", _has_bare, _with_token)

NESTED = Trait("submodules with weights of their own", _has_nested, plain)


def _with_buffer(device: torch.device) -> Probe:
    norm = filled(nn.BatchNorm1d(16, device=device))
    return Probe(nn.Sequential(linear(16, 16, device), norm), batch(device))


BUFFERS = Trait(
    "floating-point buffers", lambda p: any(buffer.is_floating_point() for buffer in p.module.buffers()), _with_buffer
)
