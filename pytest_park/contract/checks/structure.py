"""C13 to C15: the module changes its structure, or parking ends, while weights are parked."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..case import Case, adopt, collect_garbage
from ..host import HostLedger
from ..parkable import Parkable
from ..probes import batch, linear
from ..registry import promise
from ..snapshot import bits_of
from ..traits import NESTED, PLAIN
from ..verdict import Broken, NotApplicable, bytes_text

LOST_BY_NAME = """weights are found again by the names they had when they were parked; a name that is gone is skipped
        silently and the placeholder stays"""


class _Wrapped(nn.Module):
    """What LoRA does to a layer: the same layer, one level deeper."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def _target(case: Case) -> str:
    names = [name for name in case.plain_weights() if "." in name]
    if not names:
        raise NotApplicable("no submodule with a weight of its own")
    return names[0]


def _rename(case: Case, name: str) -> None:
    owner, leaf = case.owner(name)
    weight = case.module.get_parameter(name)
    case.note(f"{name} renamed to {leaf}_renamed")
    delattr(owner, leaf)
    owner.register_parameter(f"{leaf}_renamed", weight)


def _wrap(case: Case, name: str) -> None:
    path = name.rpartition(".")[0]
    parent, leaf = case.owner(path)
    case.note(f"{path} wrapped: it is {path}.base_layer now")
    setattr(parent, leaf, _Wrapped(case.module.get_submodule(path)))


MOVES = {"renamed": _rename, "wrapped": _wrap}


@promise(
    13,
    "a weight that was renamed or wrapped while parked gets its data back",
    cause=LOST_BY_NAME,
    reports=("sgl-project/sglang/pull/16298", "radixark/miles/issues/1958"),
    variants=MOVES,
    on=NESTED,
)
def check_a_renamed_weight_gets_its_data_back(case: Case, move: Callable[[Case, str], None]) -> None:
    name = _target(case)
    weight = case.module.get_parameter(name)
    case.park()
    move(case, name)
    case.restore()
    _expect_own_data(case, name, weight)


def _expect_own_data(case: Case, name: str, weight: nn.Parameter) -> None:
    then = case.before.records[name]
    if tuple(weight.shape) != then.shape or bits_of(weight) != then.bits:
        raise Broken(
            expected=f"the parameter that was {name} has its values after restore",
            seen=f"shape {list(weight.shape)} instead of {list(then.shape)}"
            if tuple(weight.shape) != then.shape
            else "other values",
            names=[name],
        )
    device = weight.untyped_storage().device
    if device != then.device:
        raise Broken(expected=f"{name} on {then.device} after restore", seen=f"it is on {device}", names=[name])


@promise(
    13,
    "a weight that was replaced while parked has the new data, and the old copy is dropped",
    cause="restore writes the old copy to whatever has the old name now, or keeps it for good",
    reports=("sgl-project/sglang/pull/35832",),
    on=NESTED,
)
def check_a_replaced_weight_has_the_new_data(case: Case) -> None:
    name = _target(case)
    owner, leaf = case.owner(name)
    host = HostLedger()
    case.park()
    copies = host.bytes()
    old = weakref.ref(case.module.get_parameter(name))
    then = case.before.records[name]
    new = torch.full(then.shape, 3.0, dtype=then.dtype)
    case.note(f"{name} replaced by a new Parameter")
    setattr(owner, leaf, nn.Parameter(new.to(then.device), requires_grad=False))
    case.restore()
    case.expect_value(name, new, written="replacing the Parameter")
    case.park()
    copies_now = host.bytes() - bytes_of(new)
    case.restore()
    case.expect_value(name, new, written="replacing the Parameter, and another cycle")
    _expect_dropped(old, copies_now, copies, name)


@promise(
    13,
    "a weight that was deleted while parked leaves no host copy behind",
    cause="host copies are kept by name, and nothing takes out the ones whose name is gone",
    reports=("vllm-project/vllm/issues/36651", "fzyzcjy/torch_memory_saver/issues/92"),
    on=NESTED,
)
def check_a_deleted_weight_leaves_no_copy(case: Case) -> None:
    name = _target(case)
    owner, leaf = case.owner(name)
    host = HostLedger()
    case.park()
    copies = host.bytes()
    old = weakref.ref(case.module.get_parameter(name))
    case.note(f"{name} deleted")
    delattr(owner, leaf)
    case.restore()
    case.park()
    _expect_dropped(old, host.bytes(), copies - case.before.records[name].storage_bytes, name)
    case.restore()


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _expect_dropped(old: weakref.ref[nn.Parameter], seen: int, most: int, name: str) -> None:
    collect_garbage()
    if old() is not None:
        raise Broken(expected=f"nothing holds the old parameter {name}", seen="it is still alive", names=[name])
    if seen > most:
        raise Broken(expected=f"host copies of {bytes_text(most)} without {name}", seen=bytes_text(seen), names=[name])


@promise(
    14,
    "a placeholder is never taken for a weight: not after a rename, not when parked again",
    cause="a parameter with an unknown name counts as resident, and its placeholder becomes the copy",
    reports=("sgl-project/sglang/issues/38166", "sgl-project/sglang/pull/32743"),
    variants=MOVES,
    on=NESTED,
)
def check_a_renamed_placeholder_is_not_parked(case: Case, move: Callable[[Case, str], None]) -> None:
    name = _target(case)
    weight = case.module.get_parameter(name)
    case.park()
    move(case, name)
    case.park()
    case.restore()
    _expect_own_data(case, name, weight)


@promise(
    14,
    "setting parking up anew while parked does not take placeholders for weights",
    cause="reconfiguration lists the module's parameters as it finds them",
    reports=("sgl-project/sglang/pull/32743",),
)
def check_reconfiguration_while_parked_captures_no_placeholder(case: Case) -> None:
    if case.parkable.reconfigure is None:
        raise NotApplicable("Parkable(reconfigure=...) is not declared")
    case.park()
    case.attempt("reconfigure while parked", case.parkable.reconfigure)
    case.park()
    case.restore()
    case.expect_same(after="reconfiguration while parked, a park and a restore")
    case.cycle()
    case.expect_same(after="reconfiguration while parked and another cycle")


@promise(
    14,
    "a second component that is set up over a parked submodule does not take its placeholders for weights",
    cause="the second component lists the shared submodule's parameters as it finds them",
    reports=("sgl-project/sglang/pull/32743", "vllm-project/vllm-omni/pull/6993"),
)
def check_a_component_over_a_parked_submodule_captures_no_placeholder(case: Case) -> None:
    device = case.device.device
    shared = linear(16, 16, device)
    values = [bits_of(weight) for weight in shared.parameters()]
    first = case.adopt(nn.Sequential(shared, linear(16, 16, device)), batch(device))
    case.scarce(bytes_of(shared.get_parameter("weight")))
    case.attempt("the first component parks", first.park)
    try:
        second = case.adopt(nn.Sequential(shared, linear(16, 16, device)), batch(device))
    except Exception:
        second = None  # refused: fine, as long as the weights are there at the end
    if second is not None:
        case.attempt("a second component over the same submodule parks", second.park)
        case.device.relieve()
        case.attempt("it restores", second.restore)
    case.device.relieve()
    case.attempt("the first component restores", first.restore)
    moved = any(weight.untyped_storage().device != device for weight in shared.parameters())
    if moved or [bits_of(weight) for weight in shared.parameters()] != values:
        raise Broken(
            expected="the shared submodule has its values after both components restored",
            seen="some are not on the device"
            if moved
            else f"other values, with shapes {[list(weight.shape) for weight in shared.parameters()]}",
            names=[name for name, _ in shared.named_parameters()],
        )


@promise(
    15,
    "ending parking while parked leaves real weights or raises, and the old handle then does nothing",
    cause="disabling only switches a flag off, after which restore returns at once and the placeholders stay",
    reports=("fzyzcjy/torch_memory_saver/issues/92", "huggingface/diffusers/issues/8644"),
    on=PLAIN,
)
def check_ending_parking_leaves_real_weights(case: Case) -> None:
    if not case.parkable.ends:
        raise NotApplicable("Parkable(ends={'disable': ...}) is not declared")
    _end(case, next(iter(case.parkable.ends)))
    for label in list(case.parkable.ends)[1:]:
        probe = PLAIN.probe(case.parkable.device)
        with Case(adopt(case.parkable, probe.module, probe.inputs, probe.streamed)) as another:
            try:
                _end(another, label)
            finally:
                case.history[:] = another.history


def _end(case: Case, label: str) -> None:
    case.park()
    case.device.relieve()
    refused = case.attempt(label, case.parkable.ends[label])
    if refused is not None:
        case.restore()
        case.expect_same(after=f"{label} was refused while parked, and restore")
        return
    case.expect_same("values", "device", after=f"{label} while parked")
    case.expect_output(after=f"{label} while parked")
    _expect_dead(case, case.parkable, label)


def _expect_dead(case: Case, parkable: Parkable, label: str) -> None:
    before = case.device.bytes
    for verb, action in (("park", parkable.park), ("restore", parkable.restore)):
        if verb == "park":
            case.scarce()
        else:
            case.device.relieve()
        case.attempt(verb, action)
        case.expect_same(after=f"{label} and {verb} by the old handle")
    if case.device.settled_bytes() != before:
        raise Broken(expected="the old handle does nothing", seen="device bytes changed")
