"""C12 for whoever has a call that writes new weights (refit): it reaches them wherever they are, or writes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..case import Case, flat_tensors, output_difference
from ..odd_weights import SHAPES
from ..registry import promise
from ..traits import STREAMED
from ..verdict import Broken, NotApplicable, error_text

Refit = Callable[[dict[str, torch.Tensor]], object]


def _update(case: Case, update: Refit | None, new: dict[str, torch.Tensor]) -> None:
    """An update that fits; it may be refused in no state."""
    if update is None:
        raise NotApplicable("Parkable(update=...) is not declared")
    error = case.attempt(f"update of {', '.join(new)}", lambda: update(new))
    if error is not None:
        raise Broken(expected="an update with values that fit returns", seen=error_text(error), names=new)


@promise(
    12,
    "an update of parked weights takes effect, for good, and keeps their layout",
    cause="""the new values are written to the placeholder, or to a host copy that takes the place of the old one with
        strides of its own""",
    reports=("sgl-project/sglang/pull/35832", "sgl-project/sglang/issues/31924"),
    variants={"the module as it is": None, "transposed weights": SHAPES["transposed weights"]},
)
def check_an_update_reaches_parked_weights(case: Case, kind: object) -> None:
    names = case.plain_weights()
    if not names:
        raise NotApplicable("no floating-point weight that is alone in its storage")
    new = {name: (case.module.get_parameter(name).detach() + 1).cpu() for name in names}
    case.park()
    _update(case, case.parkable.update, new)
    for after in ("an update while parked, and restore", "another cycle"):
        case.restore()
        for name, value in new.items():
            case.expect_value(name, value, written=f"{after}")
        case.expect_same("dtype", "device", "layout", after=after)
        case.park()


@promise(
    12,
    "an update of streamed layers takes effect, for good, whether the component is parked or not",
    cause="the new values are written to what a streamed weight is between two uses, and not to the host store",
    reports=("sgl-project/sglang/pull/35832", "sgl-project/sglang/issues/31924"),
    variants={"while parked": True, "while restored": False},
)
def check_an_update_reaches_streamed_layers(case: Case, parked: bool) -> None:
    device = case.device.device
    probe, twin = STREAMED.probe(device), STREAMED.probe(device)
    new = {name: weight.detach().cpu() / 2 for name, weight in twin.module.named_parameters() if "blocks." in name}
    twin.module.load_state_dict(new, strict=False)
    with torch.no_grad():
        expected = flat_tensors(twin.module(twin.inputs))
    stack = case.adopt(probe.module, probe.inputs, probe.streamed)
    if parked:
        case.scarce()
        case.attempt("park", stack.park)
    _update(case, stack.update, new)
    for after in ("the update", "the update and a cycle"):
        case.device.relieve()
        case.attempt("restore", stack.restore)
        with torch.no_grad():
            wrong = output_difference(expected, flat_tensors(stack.call()))
        if wrong:
            raise Broken(expected=f"the output with the new values of the layers, after {after}", seen=wrong, names=new)
        case.scarce()
        case.attempt("park", stack.park)
    case.device.relieve()
    case.attempt("restore", stack.restore)


@promise(
    12,
    "an update with a value of another shape is refused, and nothing is written, also of what fits",
    cause="values are copied with broadcasting, or one after the other until one does not fit",
    reports=("sgl-project/sglang/pull/35832", "sgl-project/sglang/issues/31924"),
    variants={"while parked": True, "while resident": False},
)
def check_an_update_that_does_not_fit_is_refused(case: Case, parked: bool) -> None:
    update = case.parkable.update
    if update is None:
        raise NotApplicable("Parkable(update=...) is not declared")
    names = [name for name in case.plain_weights() if case.module.get_parameter(name).numel() > 1]
    if not names:
        raise NotApplicable("no floating-point weight of more than one element that is alone in its storage")
    new = {name: (case.module.get_parameter(name).detach() + 1).cpu() for name in names}
    for shape in ((1,), (0,)):
        if parked:
            case.park()
        wrong = new | {names[-1]: torch.full(shape, 3.0, dtype=new[names[-1]].dtype)}
        label = f"update with a value of shape {list(shape)} for {names[-1]}"
        refused = case.attempt(label, functools.partial(update, wrong))
        if refused is None:
            raise Broken(
                expected=f"an error about the shape of {names[-1]}, which is {list(new[names[-1]].shape)}",
                seen=f"a value of shape {list(shape)} was taken",
                names=[names[-1]],
            )
        case.restore()
        case.expect_same(after="a refused update")
