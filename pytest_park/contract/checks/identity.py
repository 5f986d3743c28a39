"""C32 to C34: the parameters are the same objects, autograd and inference mode behave as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..case import Case, flat_tensors
from ..registry import promise
from ..traits import BACKWARD, INFERENCE, INFERENCE_ONLY, Trait
from ..verdict import Broken, NotApplicable, error_text


@promise(
    32,
    "the parameters stay the same objects, with requires_grad, attributes, tensor hooks and weak references",
    cause="parameters are rebuilt on restore instead of being given their data back",
    reports=(
        "pytorch/pytorch/pull/192441",
        "d9d-project/d9d/pull/25",
        "NVIDIA/TransformerEngine/pull/1026",
        "huggingface/diffusers/issues/14691",
    ),
)
def check_parameters_stay_the_same_objects(case: Case) -> None:
    calls: list[str] = []
    references = {}
    for name, weight in case.weights().items():
        weight.__dict__["quantisation"] = name  # what GGUF and bitsandbytes keep on their parameters
        references[name] = weakref.ref(weight)
        if weight.requires_grad:
            weight.register_hook(lambda gradient, name=name: calls.append(name))
    then = case.snapshot()
    case.cycle()
    case.expect_same("identity", "flags", "attributes", since=then)
    gc.collect()
    gone = [name for name, reference in references.items() if reference() is None]
    if gone:
        raise Broken(expected="weak references to parameters live", seen="they are dead", names=gone)
    for name, weight in case.weights().items():
        if weight.requires_grad and weight.is_floating_point() and not weight.is_inference():
            torch.autograd.backward(weight.sum())
            weight.grad = None
            if name not in calls:
                raise Broken(expected=f"the tensor hook of {name} still runs", seen="it does not", names=[name])


def _gradients(case: Case) -> dict[str, torch.Tensor]:
    return {name: w.grad.detach().cpu().clone() for name, w in case.module.named_parameters() if w.grad is not None}


def _loss(case: Case) -> torch.Tensor:
    with torch.enable_grad():
        outputs = [tensor for tensor in flat_tensors(case.parkable.call()) if tensor.requires_grad]
        if not outputs:
            raise NotApplicable("the output does not require a gradient")
        return torch.stack([output.float().pow(2).sum() for output in outputs]).sum()


def _true_gradients(case: Case) -> dict[str, torch.Tensor]:
    loss = _loss(case)
    try:
        torch.autograd.backward(loss)
    except RuntimeError as error:
        if not case.streamed:
            raise
        raise NotApplicable(
            f"no backward runs through streamed layers that were released: {error_text(error)}"
        ) from error
    gradients = _gradients(case)
    case.module.zero_grad(set_to_none=True)
    return gradients


def _expect_gradients(case: Case, expected: dict[str, torch.Tensor], after: str) -> None:
    seen = _gradients(case)
    wrong = [name for name, value in expected.items() if name not in seen or not torch.equal(seen[name], value)]
    if wrong:
        raise Broken(
            expected=f"the same gradients as without parking, {after}",
            seen="other values" if wrong[0] in seen else "no gradient",
            names=wrong,
        )
    for name, weight in case.module.named_parameters():
        if weight.grad is not None and weight.grad.device != weight.device:
            raise Broken(
                expected=f"gradient and weight {name} on one device", seen=f"{weight.grad.device}", names=[name]
            )


@promise(
    33,
    "with a gradient present parking is refused, or the gradient is there afterwards",
    cause="the swap drops .grad, or leaves it with another shape or device than its weight",
    reports=("huggingface/transformers/issues/37720",),
    on=BACKWARD,
)
def check_a_gradient_survives(case: Case) -> None:
    _true_gradients(case)
    torch.autograd.backward(_loss(case))
    gradients = _gradients(case)
    case.scarce()
    refused = case.attempt("park with gradients present", case.parkable.park)
    if refused is None:
        case.restore()
    case.device.relieve()
    _expect_gradients(case, gradients, "after a refused park" if refused is not None else "after a cycle")
    case.expect_same(after="a park with gradients present")


@promise(
    33,
    "with a backward pending parking is refused, or the backward gives the gradients that it would have given",
    cause="the graph holds the parameters, and computes with whatever is in them when backward runs",
    reports=("pytorch/pytorch/issues/177844",),
    variants={"backward after restore": True, "backward while parked": False},
    on=BACKWARD,
)
def check_a_pending_backward_is_right(case: Case, after_restore: bool) -> None:
    expected = _true_gradients(case)
    loss = _loss(case)
    case.scarce()
    if case.attempt("park with a backward pending", case.parkable.park) is not None:
        case.device.relieve()
        torch.autograd.backward(loss)
        _expect_gradients(case, expected, "after a refused park")
        return
    if case.device.is_fake and any(weight.device.type == "cpu" for weight in case.parked_weights().values()):
        raise NotApplicable(
            "parked weights are tensors of the host: on the fake device, other than on a GPU, .data assigned across "
            "devices loses the gradient of a pending backward"
        )
    if after_restore:
        case.restore()
        error = case.attempt("backward", lambda: torch.autograd.backward(loss))
        if error is not None:
            raise Broken(expected="the backward runs after restore", seen=error_text(error))
        _expect_gradients(case, expected, "in a backward after restore")
    else:
        case.device.relieve()
        refused = case.attempt("backward while parked", lambda: torch.autograd.backward(loss))
        if refused is None:
            _expect_gradients(case, expected, "in a backward while parked")
        else:
            case.module.zero_grad(set_to_none=True)
        case.restore()
    case.expect_same(after="a backward")


@dataclass(frozen=True)
class Modes:
    """Parameters of which kind, and whether park and restore are called inside ``inference_mode``."""

    on: Trait | None
    park: bool
    restore: bool


KINDS = {
    "the module as it is": None,
    "inference parameters": INFERENCE_ONLY,
    "inference and normal parameters": INFERENCE,
}
MODES = {
    f"{kind}, park {'inside' if park else 'outside'}, restore {'inside' if restore else 'outside'}": Modes(
        on, park, restore
    )
    for kind, on in KINDS.items()
    for park in (False, True)
    for restore in (False, True)
}


@promise(
    34,
    "inference and normal parameters stay what they are, and behave as before, inside and outside inference_mode",
    cause="""the data is swapped in another mode than the parameter was made in: an inference parameter then has no
        version counter, and every linear with it raises""",
    reports=("pytorch/pytorch/issues/177844",),
    variants=MODES,
)
def check_inference_parameters_behave_as_before(case: Case, modes: Modes) -> None:
    then = _behaviour(case)
    case.scarce()
    with torch.inference_mode(modes.park):
        case.attempt("park", case.parkable.park)
    case.device.relieve()
    with torch.inference_mode(modes.restore):
        error = case.attempt("restore", case.parkable.restore)
    if error is not None:
        raise Broken(expected="restore() returns in any mode", seen=error_text(error))
    case.expect_same("values", "flags")
    now = _behaviour(case)
    changed = [f"{what}: {then[what]} became {now[what]}" for what in then if then[what] != now.get(what)]
    if changed:
        raise Broken(
            expected="every operation does what it did before", seen="; ".join(changed[:3]), names=case.weights()
        )
    for mode in (False, True):
        with torch.inference_mode(mode):
            case.expect_output(after=f"a cycle, in a forward {'inside' if mode else 'outside'} inference_mode")


def _behaviour(case: Case) -> dict[str, str]:
    """What operations do with each weight: that they work, or how they fail."""
    operations: dict[str, Callable[[nn.Parameter], Any]] = {
        "t()": lambda weight: weight.t() if weight.ndim <= 2 else None,
        "_version": lambda weight: weight._version * 0,
        "linear": lambda weight: torch.nn.functional.linear(weight, weight) if weight.ndim == 2 else None,
        "detach()": lambda weight: weight.detach(),
    }
    found = {}
    for name, weight in case.weights().items():
        if not weight.is_floating_point():
            continue
        for what, operation in operations.items():
            for mode in (False, True):
                with torch.inference_mode(mode):
                    try:
                        operation(weight)
                        outcome = "works"
                    except Exception as error:
                        outcome = type(error).__name__
                found[f"{what} of {name} {'inside' if mode else 'outside'} inference_mode"] = outcome
    return found
