"""C20: a parked component is not computed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..case import Case, flat_tensors, output_difference
from ..layers import LAYERS, PARAMETRIZED, SCALES
from ..registry import promise
from ..verdict import Broken, NotApplicable, error_text
from ..watch import SawPlaceholder, Watch

AS_IT_IS = {"the module as it is": None}
#: An error that names the state has one of these in it, or the name of the weight.
WORDS = ("park", "offload", "restore", "resident", "sleep", "host", "released")

#: How bad it is: an error that does not say that weights are parked, a kernel with a placeholder, a result, no error.
UNNAMED, SEEN, SILENT = range(3)


@dataclass(slots=True)
class Call:
    """One call of a submodule: the arguments that it gets in a forward of the component, and what it returns."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: list[torch.Tensor] = field(default_factory=list)

    def __call__(self) -> Any:
        with torch.no_grad():
            return self.module(*self.args, **self.kwargs)


def record_calls(case: Case) -> list[Call]:
    """How each submodule is called in one forward, the outermost last."""
    calls: dict[str, Call] = {}
    handles = []

    def recorder(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if name not in calls:
                calls[name] = Call(name or "the component", module, args, kwargs, flat_tensors(result))

        return record

    for name, module in case.module.named_modules():
        handles.append(module.register_forward_hook(recorder(name), with_kwargs=True))
    try:
        with torch.no_grad():
            case.parkable.call()
    finally:
        for handle in handles:
            handle.remove()
    return list(calls.values())


@promise(
    20,
    "the forward of every module that owns a parked weight raises a named error or restores it, before a kernel sees a "
    "placeholder",
    cause="""only the component's own forward is guarded, or nothing is: a placeholder of one element broadcasts and
        one of no elements makes the result empty, both without an error""",
    reports=(
        "vllm-project/vllm/issues/28714",
        "huggingface/accelerate/pull/3941",
        "pytorch/pytorch/issues/78109",
        "damian0815/compel/issues/121",
        "Comfy-Org/ComfyUI/issues/11855",
    ),
    variants=AS_IT_IS | LAYERS | {"a parametrized layer": PARAMETRIZED},
    in_child="if possible",
)
def check_a_parked_module_refuses_to_compute(case: Case, kind: object) -> None:
    calls = record_calls(case)
    case.park()
    case.device.relieve()
    parked = case.parked_weights()
    owners = {id(module) for name, module in case.module.named_modules() if _owns(name, parked)}
    faults = [
        _fault(case, call.name, call.module, call, call.expected, parked) for call in calls if id(call.module) in owners
    ]
    faults.append(_fault(case, "the component", case.module, case.parkable.call, case.expected_output, parked))
    worst = max((fault for fault in faults if fault is not None), key=lambda fault: fault[0], default=None)
    # That an error does not name the state is said once, of the module as it is, and not of every kind of layer again.
    if worst is not None and (kind is None or worst[0] > UNNAMED):
        raise worst[1]
    case.restore()
    case.expect_output(after="refused forwards and restore")


def _owns(name: str, parked: dict[str, nn.Parameter]) -> bool:
    return any(weight.rpartition(".")[0] == name for weight in parked)


def _fault(
    case: Case,
    name: str,
    module: nn.Module,
    use: Callable[[], Any],
    expected: list[torch.Tensor],
    parked: dict[str, nn.Parameter],
) -> tuple[int, Broken] | None:
    """What is wrong with how a forward is refused, if anything, and how bad that is: a silent result is the worst."""
    label = f"forward of {name} while parked"
    case.history.append(label)
    names = [name for name, weight in parked.items() if any(weight is mine for mine in module.parameters())]
    try:
        with Watch(_placeholders(case, parked)), torch.no_grad():
            wrong = output_difference(expected, flat_tensors(use()))
    except SawPlaceholder as seen:
        return SEEN, Broken(expected=f"{label} raises before any kernel runs", seen=str(seen), names=names)
    except Exception as error:
        text = f"{type(error).__name__} {error}".lower()
        if any(word in text for word in (*WORDS, *(name.lower() for name in names))):
            return None
        return UNNAMED, Broken(
            expected=f"{label} raises an error that says that weights are parked", seen=error_text(error), names=names
        )
    if not wrong:
        case.park()  # it has restored itself
        case.device.relieve()
        return None
    return SILENT, Broken(expected=f"{label} raises", seen=f"it returned a result, and {wrong}", names=names)


def _placeholders(case: Case, parked: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that stand in for their data: a weight that was moved to the host as it is is none."""
    return {
        name: weight
        for name, weight in parked.items()
        if weight.device != torch.device("cpu") or tuple(weight.shape) != case.before.records[name].shape
    }


@promise(
    20,
    "a forward while parked neither crashes nor returns a wrong value",
    cause="kernels that check no shapes read past the placeholder: torch's CPU weight_norm does",
    reports=("Comfy-Org/ComfyUI/issues/11855", "vllm-project/vllm/issues/28714"),
    variants=AS_IT_IS | {"a parametrized layer": PARAMETRIZED, "scales and shifts only": SCALES},
    in_child="only",
)
def check_a_forward_while_parked_does_not_crash(case: Case, kind: object) -> None:
    case.park()
    case.device.relieve()
    results: list[torch.Tensor] = []

    def act() -> None:
        with torch.no_grad():
            results.extend(flat_tensors(case.parkable.call()))

    refused = case.attempt("forward while parked", act)
    if refused is None:
        wrong = output_difference(case.expected_output, results)
        if wrong:
            raise Broken(expected="an error, or the right output", seen=f"a result, and {wrong}")
    elif not isinstance(refused, Exception):
        raise NotApplicable(f"the forward was interrupted: {error_text(refused)}")
