"""C16 to C19: who reads, loads, copies or converts a parked module gets the truth or an error."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..case import Case
from ..registry import promise
from ..snapshot import Snapshot, bits_of
from ..verdict import Broken, NotApplicable, error_text


def _state_dict(case: Case) -> str:
    state = case.module.state_dict()
    for name, record in case.before.records.items():
        value = state.get(name)
        if isinstance(value, torch.Tensor) and (tuple(value.shape) != record.shape or bits_of(value) != record.bits):
            return f"{name} of shape {list(value.shape)} in the state dict, {list(record.shape)} in truth"
    return ""


def _count(case: Case, measure: Callable[[torch.Tensor], int], what: str) -> str:
    seen = sum(measure(weight) for weight in _mine(case).values())
    true = sum(
        size if what == "elements" else size * record.dtype.itemsize
        for name, record in case.before.records.items()
        if name in _mine(case)
        for size in [_elements(record.shape)]
    )
    return "" if seen == true else f"{seen:,} {what} counted, {true:,} in truth"


def _mine(case: Case) -> dict[str, nn.Parameter]:
    return {
        name: weight
        for name, weight in case.module.named_parameters()
        if id(weight) not in case.streamed and name in case.before.records
    }


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _checksums(case: Case) -> str:
    for name, weight in _mine(case).items():
        record = case.before.records[name]
        true = torch.frombuffer(bytearray(record.bits), dtype=record.dtype) if record.bits else torch.empty(0)
        seen, wanted = float(weight.detach().double().sum().cpu()), float(true.double().sum())
        if not abs(seen - wanted) <= 1e-3 * abs(wanted):  # a placeholder may be NaN, which is not more than anything
            return f"sum of {name} is {seen:g}, {wanted:g} in truth"
    return ""


READERS: dict[str, Callable[[Case], str]] = {
    "state_dict": _state_dict,
    "the number of elements": lambda case: _count(case, torch.Tensor.numel, "elements"),
    "the number of bytes": lambda case: _count(case, lambda w: w.numel() * w.element_size(), "bytes"),
    "checksums": _checksums,
}


@promise(
    16,
    "reading a parked module gives the truth or raises: state_dict, counts, checksums",
    cause="the reader sees placeholders, and nothing tells it",
    reports=(
        "huggingface/accelerate/issues/2128",
        "huggingface/accelerate/issues/2129",
        "huggingface/transformers/pull/27412",
        "huggingface/transformers/pull/39280",
    ),
    variants=READERS,
)
def check_reading_while_parked_gives_the_truth(case: Case, read: Callable[[Case], str]) -> None:
    case.park()
    wrong = ""

    def act() -> None:
        nonlocal wrong
        wrong = read(case)

    case.attempt("read while parked", act)
    if wrong:
        raise Broken(expected="the true values and counts, or an error", seen=wrong, names=case.parked_weights())
    case.restore()
    case.expect_same(after="reading while parked")


@promise(
    17,
    "load_state_dict while parked takes effect, or raises and changes nothing",
    cause="the values are copied into placeholders, and restore brings the old ones back",
    reports=("sgl-project/sglang/pull/35832", "sgl-project/sglang/issues/31924"),
)
def check_loading_while_parked_takes_effect(case: Case) -> None:
    names = case.plain_weights()
    if not names:
        raise NotApplicable("no floating-point weight that is alone in its storage")
    new = {name: (case.module.get_parameter(name).detach() + 1).cpu() for name in names}
    case.park()
    refused = case.attempt("load_state_dict", lambda: case.module.load_state_dict(new, strict=False))
    case.restore()
    if refused is not None:
        case.expect_same(after="load_state_dict was refused while parked")
        return
    for name, value in new.items():
        case.expect_value(name, value, written="load_state_dict while parked")


@promise(
    17,
    "a checkpoint with the shapes of placeholders is refused",
    cause="while parked, the module has the placeholders' shapes, so a checkpoint that was saved while parked fits",
    reports=("huggingface/accelerate/issues/2128",),
)
def check_a_checkpoint_of_placeholders_is_refused(case: Case) -> None:
    names = [name for name in case.plain_weights() if _elements(case.before.records[name].shape) > 1]
    if not names:
        raise NotApplicable("no floating-point weight of more than one element that is alone in its storage")
    case.park()
    for size in (0, 1):
        state = {name: torch.zeros(size, dtype=case.before.records[name].dtype) for name in names}
        load = functools.partial(case.module.load_state_dict, state, strict=False)
        refused = case.attempt(f"load_state_dict with {size} elements each", load)
        if refused is None:
            raise Broken(
                expected="an error about the shapes",
                seen=f"a checkpoint with {size} elements for each weight was loaded",
                names=names,
            )
    case.restore()
    case.expect_same(after="a checkpoint with the shapes of placeholders was refused")


def _deepcopy(module: nn.Module) -> Any:
    return copy.deepcopy(module)


def _pickle(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


COPIES = {
    f"{way} while {state}": (make, state)
    for way, make in (("deepcopy", _deepcopy), ("pickle", _pickle))
    for state in ("parked", "resident")
}


@promise(
    18,
    "a copy of the module is independent and has the real weights, or copying is refused",
    cause="the copy is made of placeholders, or shares the host copies or the state of the original",
    reports=("huggingface/diffusers/issues/8644",),
    variants=COPIES,
)
def check_a_copy_is_independent(case: Case, how: tuple[Callable[[nn.Module], Any], str]) -> None:
    make, state = how
    made: list[nn.Module] = []
    if state == "parked":
        case.park()
    else:
        case.cycle()
    case.device.relieve()
    refused = case.attempt("copy", lambda: made.append(make(case.module)))
    if refused is not None:
        if state == "resident":
            raise NotApplicable(f"the resident module cannot be copied in this way: {error_text(refused)}")
        case.restore()
        case.expect_same(after="a copy was refused")
        return
    twin = made[0]
    restore = getattr(case.parkable.restore, "__func__", None)
    if getattr(case.parkable.restore, "__self__", None) is case.module and restore is not None:
        restore(twin)  # a copy that is parked itself has the verbs of its class
    found = case.before.differences(Snapshot(twin, ()), ("values",))
    if found:
        raise Broken(
            expected=f"the copy has the real weights ({state})",
            seen="; ".join(found[:3]),
            names=[line.split(":")[0] for line in found],
        )
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.is_floating_point() and weight.numel():
                weight.data.zero_()
    case.restore()
    case.expect_same(after="writing to the copy")


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to(bfloat16)": lambda module: module.to(torch.bfloat16),
    "half()": lambda module: module.half(),
    "double()": lambda module: module.double(),
    "to(cpu)": lambda module: module.to("cpu"),
}


@promise(
    19,
    "a conversion to another dtype or device while parked is honoured at restore or refused, for weights and buffers "
    "alike",
    cause="the conversion changes the resident buffers and the placeholders; restore brings the old dtype back",
    reports=("huggingface/diffusers/issues/4362",),
    variants=CONVERSIONS,
)
def check_a_conversion_while_parked_is_honoured(case: Case, convert: Callable[[nn.Module], Any]) -> None:
    case.park()
    case.device.relieve()
    places = {weight.device.type for weight in case.parked_weights().values()}
    if convert is CONVERSIONS["to(cpu)"] and places == {"cpu"}:
        raise NotApplicable("parked weights are tensors of the host, so that there is nothing to convert")
    refused = case.attempt("convert while parked", lambda: convert(case.module))
    case.restore()
    if refused is not None:
        case.expect_same("values", "dtype", "device", after="a conversion was refused while parked")
        return
    expected = copy_of_records(case, convert)
    for name, tensor in (*case.module.named_parameters(), *case.module.named_buffers()):
        wanted = expected.get(name)
        if wanted is None:
            continue
        device, value = wanted
        if tensor.dtype != value.dtype or tensor.device != device:
            raise Broken(
                expected=f"{value.dtype} on {device}, as converted, for every weight and buffer",
                seen=f"{name} is {tensor.dtype} on {tensor.device}",
                names=[name],
            )
        if bits_of(tensor) != bits_of(value):
            raise Broken(expected=f"the converted values of {name}", seen="other values", names=[name])


def copy_of_records(case: Case, convert: Callable[[nn.Module], Any]) -> dict[str, tuple[torch.device, torch.Tensor]]:
    """What the conversion makes of the module as it was: device and value by name."""
    found = {}
    for name, record in case.before.records.items():
        if record.dtype.itemsize and record.bits:
            value = torch.frombuffer(bytearray(record.bits), dtype=record.dtype).reshape(record.shape)
            holder = nn.Module()
            holder.register_buffer("value", value)
            convert(holder)
            moved = convert is CONVERSIONS["to(cpu)"]
            found[name] = (torch.device("cpu") if moved else record.device, holder.get_buffer("value"))
    return found
