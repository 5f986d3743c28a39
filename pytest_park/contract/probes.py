"""Traits that promises are about, and small modules that have them, for parkables that can adopt a module.

A trait is looked for in the user's own module first. The probes use nothing random, so that two of them are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .case import flat_tensors, streamed_parameters
from .parkable import Parkable
from .subclass import Pair, dtensor, is_dtensor


@dataclass(slots=True)
class Probe:
    """A module on the device, arguments for its forward, and the names of its streamed lists."""

    module: nn.Module
    inputs: Any
    streamed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Trait:
    """Something that a module has or has not."""

    name: str
    found_in: Callable[[Parkable], bool]
    probe: Callable[[torch.device], Probe]


def ramp(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct small values, exact in every dtype: none is zero, none equals its neighbour."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, device="cpu") % 7 + 1).to(torch.float32).div(8).reshape(shape).to(dtype).to(device)


class Weights(nn.Module):
    """Parameters over the tensors given, as they are; the forward reads every value of each."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.parameters(recurse=False):
            values = weight.abs() if weight.dtype.is_complex else weight
            x = x + values.to(torch.float32).reshape(-1).cumsum(0).sum()
        return x


class Calculation(nn.Module):
    """A forward given as a function of (module, x) over named parts, for layers that torch has no class for."""

    def __init__(
        self, function: Callable[[Any, torch.Tensor], torch.Tensor], **parts: torch.Tensor | nn.Module
    ) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


class Branch(nn.Module):
    """What every probe of a layer sits in: a plain layer before it and one after it."""

    def __init__(self, layer: nn.Module, device: torch.device, width: int = 16) -> None:
        super().__init__()
        self.before = linear(width, width, device)
        self.layer = layer
        self.after = nn.LayerNorm(width, device=device)

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.layer(self.before(x)))


def filled(module: nn.Module) -> nn.Module:
    """*module* with deterministic weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(ramp(*parameter.shape, device=torch.device("cpu"), dtype=parameter.dtype))
    return module.eval()


def linear(inputs: int, outputs: int, device: torch.device, bias: bool = True) -> nn.Module:
    return filled(nn.Linear(inputs, outputs, bias=bias, device=device))


def batch(device: torch.device, width: int = 16) -> torch.Tensor:
    return ramp(4, width, device=device)


def plain(device: torch.device, width: int = 64, layers: int = 2) -> Probe:
    """Linear layers and nothing special, for arithmetic with bytes."""
    return Probe(nn.Sequential(*(linear(width, width, device) for _ in range(layers))), batch(device, width))


def _named(parkable: Parkable) -> list[torch.nn.Parameter]:
    """The weights that can be parked, each once: streamed layers may be placeholders, or views of a flat buffer."""
    streamed = {id(parameter) for parameter in streamed_parameters(parkable)}
    return [parameter for parameter in parkable.module.parameters() if id(parameter) not in streamed]


def _never(parkable: Parkable) -> bool:
    return False


def _any(test: Callable[[torch.Tensor], bool]) -> Callable[[Parkable], bool]:
    return lambda parkable: any(test(parameter) for parameter in _named(parkable))


def _weights(name: str, test: Callable[[torch.Tensor], bool], make: Callable[[torch.device], torch.Tensor]) -> Trait:
    """Weights with one odd property, between two ordinary ones."""

    def probe(device: torch.device) -> Probe:
        ordinary = ramp(16, 16, device=device)
        return Probe(Weights(first=ordinary, odd=make(device), last=ordinary.clone()), batch(device))

    return Trait(name, _any(test), probe)


def _dtype(dtype: torch.dtype) -> Trait:
    def make(device: torch.device) -> torch.Tensor:
        values = ramp(6, 5, device=torch.device("cpu")).mul(8)
        return (values > 3 if dtype is torch.bool else values.to(dtype)).to(device)

    name = str(dtype).removeprefix("torch.")
    return _weights(f"{name} weights", lambda weight: weight.dtype is dtype, make)


DTYPES = {
    trait.name: trait
    for trait in map(
        _dtype,
        (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.complex64,
            torch.bool,
            torch.uint8,
            torch.int64,
        ),
    )
}

SHAPES = {
    trait.name: trait
    for trait in (
        _weights("0-dim weights", lambda w: w.ndim == 0, lambda device: ramp(1, device=device)[0].clone()),
        _weights("one-element weights", lambda w: w.ndim > 0 and w.numel() == 1, lambda device: ramp(1, device=device)),
        _weights("empty weights", lambda w: w.numel() == 0, lambda device: torch.empty(0, 3, device=device)),
        _weights(
            "transposed weights",
            lambda w: w.ndim == 2 and not w.is_contiguous() and w.t().is_contiguous(),
            lambda device: ramp(6, 5, device=device).t(),
        ),
        _weights(
            "channels_last weights",
            lambda w: w.ndim == 4 and not w.is_contiguous() and w.is_contiguous(memory_format=torch.channels_last),
            lambda device: ramp(2, 3, 3, 4, device=device).permute(0, 3, 1, 2),
        ),
        _weights(
            "channels_last_3d weights",
            lambda w: w.ndim == 5 and not w.is_contiguous() and w.is_contiguous(memory_format=torch.channels_last_3d),
            lambda device: ramp(2, 2, 3, 3, 4, device=device).permute(0, 4, 1, 2, 3),
        ),
    )
}


def _occupied(weight: torch.Tensor) -> int:
    return weight.untyped_storage().nbytes()


def _own_bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


VIEWS = {
    trait.name: trait
    for trait in (
        _weights(
            "weights that are slices of a larger storage",
            lambda w: w.is_contiguous() and 0 < _own_bytes(w) < _occupied(w),
            lambda device: ramp(40, 5, device=device)[10:16],
        ),
        _weights(
            "weights padded in their rows",
            lambda w: w.ndim == 2 and w.stride(1) == 1 and w.stride(0) > w.size(1) > 1,
            lambda device: ramp(6, 16, device=device)[:, :5],
        ),
        _weights(
            "expanded weights",
            lambda w: any(stride == 0 and size > 1 for stride, size in zip(w.stride(), w.shape, strict=True)),
            lambda device: ramp(4, 1, device=device).expand(4, 500),
        ),
        _weights(
            "weights that overlap themselves",
            lambda w: 0 < _occupied(w) < _own_bytes(w) and 0 not in w.stride(),
            lambda device: ramp(24, device=device).as_strided((6, 6), (3, 1)),
        ),
    )
}


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
    return any(named.count(id(parameter)) > 1 for parameter in _named(parkable))


def _shared(*, buffers: bool) -> Callable[[Parkable], bool]:
    def found(parkable: Parkable) -> bool:
        weights = [(id(w), w.untyped_storage().data_ptr()) for w in _named(parkable) if _occupied(w)]
        addresses = [address for _, address in weights]
        if buffers:
            return any(b.untyped_storage().data_ptr() in addresses for b in parkable.module.buffers() if _occupied(b))
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


def _one_element(position: str) -> Trait:
    def probe(device: torch.device) -> Probe:
        single, large = ramp(1, device=device), ramp(16, 16, device=device)
        # Alone they are so many that parking them leaves room for a placeholder, which needs a block of the allocator.
        weights = {
            "alone": {f"single{number}": ramp(number % 7 + 1, device=device)[-1:].clone() for number in range(256)},
            "first": {"single": single, "large": large},
            "last": {"large": large, "single": single},
            "between, with no dimension": {"large": large, "single": single[0].clone(), "other": large.clone()},
        }
        return Probe(Weights(**weights[position]), batch(device))

    return Trait(f"a weight of one element {position}", _never, probe)


ONE_ELEMENT = {
    position: _one_element(position) for position in ("alone", "first", "last", "between, with no dimension")
}


class Stack(nn.Module):
    """Streamed blocks between non-layer weights; with *tied* one weight of a block is also the head's."""

    def __init__(self, device: torch.device, *, tied: bool = False, head_first: bool = False, width: int = 16) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block(width, device) for _ in range(3))
        head = linear(width, width, device)
        if tied:
            head.register_parameter("weight", blocks.get_parameter("1.linear.weight"))
        if head_first:
            self.head = head
            self.blocks = blocks
        else:
            self.blocks = blocks
            self.head = head
        self.embed = linear(width, width, device)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = linear(width, width, device)
        self.register_buffer("table", ramp(width, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.get_buffer("table")
        return result


def _stack(**options: Any) -> Callable[[torch.device], Probe]:
    return lambda device: Probe(Stack(device, **options), batch(device), ("blocks",))


STREAMED = Trait("streamed layers", lambda parkable: bool(parkable.streamed), _stack())
TIED_TO_STREAMED = {
    "the layers come first": Trait("weight of a layer tied to the head", _never, _stack(tied=True)),
    "the head comes first": Trait("weight of a layer tied to the head", _never, _stack(tied=True, head_first=True)),
}


def _subclass(device: torch.device) -> Probe:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = self.pair.first, self.pair.second
        result: torch.Tensor = self.plain(x) @ (first + second)
        return result

    pair = Pair(ramp(16, 16, device=device), ramp(16, 16, device=device).mul(2))
    return Probe(Calculation(forward, pair=pair, plain=linear(16, 16, device)), batch(device))


SUBCLASS = Trait(
    "weights that wrap other tensors", _any(lambda weight: hasattr(type(weight), "__tensor_flatten__")), _subclass
)


def _distributed(device: torch.device) -> Probe:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.plain(x) @ self.sharded.to_local()
        return result

    sharded = dtensor(ramp(16, 16, device=device))
    return Probe(Calculation(forward, sharded=sharded, plain=linear(16, 16, device)), batch(device))


DTENSOR = Trait("DTensor weights", _any(is_dtensor), _distributed)


def _both_kinds(parkable: Parkable) -> bool:
    return len({weight.is_inference() for weight in _named(parkable)}) == 2


def _inference(device: torch.device) -> Probe:
    with torch.inference_mode():
        inside = linear(16, 16, device)
    return Probe(nn.Sequential(inside, linear(16, 16, device)), batch(device))


def _inference_only(device: torch.device) -> Probe:
    with torch.inference_mode():
        return plain(device, width=16)


INFERENCE = Trait("inference weights beside normal ones", _both_kinds, _inference)
INFERENCE_ONLY = Trait("inference weights only", lambda p: all(w.is_inference() for w in _named(p)), _inference_only)


def _backward_runs(parkable: Parkable) -> bool:
    """Not where nothing requires a gradient, and not through layers that are streamed for inference only."""
    try:
        with torch.enable_grad():
            outputs = [tensor for tensor in flat_tensors(parkable.call()) if tensor.requires_grad]
            torch.autograd.backward(torch.stack([output.float().sum() for output in outputs]).sum())
    except Exception:
        return False
    finally:
        parkable.module.zero_grad(set_to_none=True)
    return True


BACKWARD = Trait("a forward that a backward runs through", _backward_runs, plain)

# For arithmetic with bytes a module without ties and views is better than the user's own, where one can be had.
PLAIN = Trait("plain layers", lambda parkable: parkable.adopt is None, plain)


def _has_nested(parkable: Parkable) -> bool:
    prefixes = tuple(f"{name}." for name in parkable.streamed)
    names = [name for name, _ in parkable.module.named_parameters() if not prefixes or not name.startswith(prefixes)]
    return any("." in name for name in names)


NESTED = Trait("submodules with weights of their own", _has_nested, plain)


def _with_buffer(device: torch.device) -> Probe:
    norm = filled(nn.BatchNorm1d(16, device=device))
    return Probe(nn.Sequential(linear(16, 16, device), norm), batch(device))


BUFFERS = Trait(
    "floating-point buffers", lambda p: any(buffer.is_floating_point() for buffer in p.module.buffers()), _with_buffer
)
