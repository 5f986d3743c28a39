"""C35 to C37 and C39: streamed layers, several owners, several names, wrapper subclasses."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ..case import Case, flat_tensors, output_difference, streamed_parameters
from ..host import HostLedger
from ..parkable import Parkable
from ..probes import batch, linear
from ..registry import promise
from ..snapshot import bits_of, inner_tensors
from ..subclass import wraps_others
from ..traits import DTENSOR, SEVERAL_NAMES, STREAMED, SUBCLASS, TIED_TO_STREAMED
from ..verdict import Broken, bytes_text, error_text


@promise(
    35,
    "park and restore leave streamed layers and their buffers where and as they are",
    cause="the non-layer weights are listed as everything on the device, so that a prefetched layer is parked with "
    "them",
    reports=("huggingface/diffusers/pull/13238", "vipshop/cache-dit/pull/1111"),
    on=STREAMED,
)
def check_streamed_layers_are_left_alone(case: Case) -> None:
    def state() -> dict[str, tuple[str, int, bytes]]:
        mine = {id(parameter) for parameter in streamed_parameters(case.parkable)}
        prefixes = tuple(f"{name}." for name in case.parkable.streamed)
        tensors: dict[str, torch.Tensor] = {
            name: weight for name, weight in case.module.named_parameters() if id(weight) in mine
        }
        tensors |= {name: buffer for name, buffer in case.module.named_buffers() if name.startswith(prefixes)}
        return {
            name: (str(tensor.device), tensor.untyped_storage().data_ptr(), bits_of(tensor))
            for name, tensor in tensors.items()
        }

    before = state()
    for verb in ("park", "restore"):
        case.park() if verb == "park" else case.restore()
        now = state()
        changed = [name for name in before if now[name] != before[name]]
        if changed:
            moved = [name for name in changed if now[name][:2] != before[name][:2]]
            raise Broken(
                expected=f"streamed layers and their buffers untouched by {verb}",
                seen="another address or device" if moved else "other values",
                names=changed,
            )
    case.expect_output()


def _order_name(order: tuple[str, ...]) -> str:
    return ", ".join(order)


ORDERS = {
    _order_name(order): order
    for order in itertools.permutations(("A parks", "B parks", "A restores", "B restores"))
    if order.index("A parks") < order.index("A restores") and order.index("B parks") < order.index("B restores")
}


@promise(
    36,
    "a submodule with two owners is parked only when both have released it, in any order, with one host copy",
    cause="each owner keeps its own record of the shared weights, and parks them while the other one uses them",
    reports=("vllm-project/vllm-omni/pull/6993",),
    variants=ORDERS,
)
def check_a_shared_submodule_is_parked_when_both_released_it(case: Case, order: tuple[str, ...]) -> None:
    device = case.device.device
    shared = linear(16, 16, device)
    modules = {owner: nn.Sequential(shared, linear(16, 16, device)) for owner in "AB"}
    x = batch(device)
    with torch.no_grad():
        expected = flat_tensors(modules["A"](x))
    owners = {owner: case.adopt(module, x) for owner, module in modules.items()}
    true_bytes = sum(w.untyped_storage().nbytes() for m in modules.values() for w in set(m.parameters()))
    true_bytes -= sum(weight.untyped_storage().nbytes() for weight in shared.parameters())
    released: set[str] = set()
    host = HostLedger()
    at_first = host.bytes()
    case.history.append("A and B are components that share a linear layer")
    for step in order:
        owner, verb = step.split()
        if verb == "parks":
            case.scarce(true_bytes // 3, times=2)
            action = owners[owner].park
            released.add(owner)
        else:
            case.device.relieve()
            action = owners[owner].restore
            released.discard(owner)
        error = case.attempt(step, action)
        if error is not None:
            raise Broken(expected=f"{step} works", seen=error_text(error))
        if released == {"A", "B"} and (copies := host.bytes() - at_first) > true_bytes:
            raise Broken(expected=f"one host copy of everything, {bytes_text(true_bytes)}", seen=bytes_text(copies))
        for user in set(owners) - released:
            _expect_usable(case, user, owners[user], expected)


def _expect_usable(case: Case, owner: str, parkable: Parkable, expected: list[torch.Tensor]) -> None:
    try:
        with torch.no_grad():
            seen = flat_tensors(parkable.call())
    except Exception as error:
        raise Broken(
            expected=f"{owner}, which has not released the shared submodule, can be used", seen=error_text(error)
        ) from error
    wrong = output_difference(expected, seen)
    if wrong:
        raise Broken(expected=f"{owner}, which has not released the shared submodule, computes as before", seen=wrong)


@promise(
    37,
    "one parameter under several names comes back as one, also across a streamed layer and a non-layer module",
    cause="a tied weight has two owners, the streamer and the parking, and each keeps a state of its own",
    reports=("vipshop/cache-dit/pull/1111", "huggingface/accelerate/issues/993"),
    variants={"tied weights": SEVERAL_NAMES} | TIED_TO_STREAMED,
)
def check_a_tied_weight_comes_back_as_one(case: Case, kind: object) -> None:
    named = dict(case.module.named_parameters(remove_duplicate=False))
    for number in (1, 2):
        case.cycle()
        now = dict(case.module.named_parameters(remove_duplicate=False))
        for first, second in itertools.combinations(named, 2):
            if named[first] is named[second] and now[first] is not now[second]:
                raise Broken(
                    expected=f"{first} and {second} are one parameter", seen="they are two", names=[first, second]
                )
        case.expect_same(after=f"{number} cycle{'s' if number > 1 else ''}")
        case.expect_output(after=f"{number} cycle{'s' if number > 1 else ''}")


@promise(
    39,
    "the bytes of a DTensor or wrapper subclass fall and come back, or it is named as skipped and untouched; the "
    "others are parked",
    cause="assigning .data to a wrapper changes the wrapper and frees nothing of what it wraps",
    reports=(
        "huggingface/diffusers/pull/13276",
        "huggingface/diffusers/pull/13305",
        "bitsandbytes-foundation/bitsandbytes/issues/937",
    ),
    variants={"a wrapper subclass": SUBCLASS, "a DTensor": DTENSOR},
)
def check_a_wrapper_subclass_is_parked_or_named(case: Case, kind: object) -> None:
    wrappers = {name: w for name, w in case.weights().items() if wraps_others(w)}
    sizes = {name: _inner_bytes(name, weight) for name, weight in wrappers.items()}
    others = case.bytes - sum(sizes.values())
    before = case.device.settled_bytes()
    result = case.park(must_free=False)
    freed = before - case.device.settled_bytes()
    report = case.report(result)
    skipped = [name for name, _ in report.skipped] if report else []
    unnamed = [name for name in wrappers if not any(name in other for other in skipped)]
    wanted = others + sum(sizes[name] for name in unnamed)
    if freed < wanted - case.device.slack * len(case.before.records):
        raise Broken(
            expected=f"{bytes_text(wanted)} freed, or the wrappers named as skipped",
            seen=f"{bytes_text(freed)} freed; skipped: {', '.join(skipped) or 'nothing'}",
            names=wrappers,
        )
    case.restore()
    case.expect_same("values")
    for name, weight in wrappers.items():
        if case.module.get_parameter(name) is not weight:
            raise Broken(expected=f"{name} is the same parameter", seen="it is another object", names=[name])
    case.expect_output()


def _inner_bytes(name: str, weight: torch.Tensor) -> int:
    return sum(inner.untyped_storage().nbytes() for _, inner in inner_tensors(name, weight))
