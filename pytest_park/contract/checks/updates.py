"""C11 and C12: what is written to a weight stays written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..case import Case
from ..registry import promise
from ..snapshot import Snapshot
from ..verdict import Broken, NotApplicable

Write = Callable[[nn.Module, str, torch.Tensor], None]


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _add(module: nn.Module, name: str, new: torch.Tensor) -> None:
    weight = module.get_parameter(name)
    with torch.no_grad():
        weight.add_(new.to(weight.device) - weight)


def _data_add(module: nn.Module, name: str, new: torch.Tensor) -> None:
    weight = module.get_parameter(name)
    weight.data.add_(new.to(weight.device) - weight.data)


def _data_copy(module: nn.Module, name: str, new: torch.Tensor) -> None:
    module.get_parameter(name).data.copy_(new)


def _data_set(module: nn.Module, name: str, new: torch.Tensor) -> None:
    weight = module.get_parameter(name)
    weight.data = new.to(weight.device)


def _load(module: nn.Module, name: str, new: torch.Tensor) -> None:
    module.load_state_dict({name: new}, strict=False)


def _load_and_assign(module: nn.Module, name: str, new: torch.Tensor) -> None:
    device = module.get_parameter(name).device
    module.load_state_dict({name: new.to(device)}, strict=False, assign=True)


def _replace(module: nn.Module, name: str, new: torch.Tensor) -> None:
    owner, leaf = _owner(module, name)
    old = module.get_parameter(name)
    setattr(owner, leaf, nn.Parameter(new.to(old.device), requires_grad=old.requires_grad))


def _merge(module: nn.Module, name: str, new: torch.Tensor) -> None:
    weight = module.get_parameter(name)
    weight.data += new.to(weight.device) - weight.data


WRITERS: dict[str, Write] = {
    "add_": _add,
    "data.add_": _data_add,
    "data.copy_": _data_copy,
    "data =": _data_set,
    "load_state_dict": _load,
    "load_state_dict(assign=True)": _load_and_assign,
    "a replaced Parameter": _replace,
    "a LoRA merge": _merge,
}


@dataclass(frozen=True)
class Update:
    """A way to write, and when."""

    writer: str
    point: str


POINTS = ("before the first park", "after a cycle", "between two restores")
UPDATES = {f"{writer} {point}": Update(writer, point) for writer in WRITERS for point in POINTS}


@promise(
    11,
    "a value written to a resident weight survives the next park and restore, and the next write too",
    cause="""the host copy of an earlier park is kept and used again without proof that it is current; _version does not
        prove it, because writes through .data do not change it""",
    reports=(
        "sgl-project/sglang/pull/16298",
        "huggingface/diffusers/issues/11791",
        "huggingface/diffusers/issues/12396",
        "sgl-project/sglang/pull/35832",
    ),
    variants=UPDATES,
)
def check_a_write_is_not_undone(case: Case, update: Update) -> None:
    names = case.plain_weights()
    if not names:
        raise NotApplicable("no floating-point weight that is alone in its storage")
    if update.point != "before the first park":
        case.cycle()
    earlier = [case.before]
    for number in (1, 2):
        for name in dict.fromkeys((names[0], names[-1])):
            case.note(f"{name} written by {update.writer}")
            old = case.module.get_parameter(name).detach()
            WRITERS[update.writer](case.module, name, (old + number).cpu())
        written = case.snapshot()
        if update.point == "between two restores":
            case.restore()
            _expect_written(case, written, earlier, update, "a restore with nothing parked")
        case.cycle()
        _expect_written(case, written, earlier, update, "the next park and restore")
        earlier.append(written)


def _expect_written(case: Case, written: Snapshot, earlier: list[Snapshot], update: Update, after: str) -> None:
    now = case.snapshot()
    found = written.differences(now, ("values",))
    if found:
        names = [line.split(":")[0] for line in found]
        undone = [
            name for name in names if name in now.records and _bits(now, name) in [_bits(old, name) for old in earlier]
        ]
        raise Broken(
            expected=f"the values written by {update.writer} after {after}",
            seen=f"{', '.join(undone)} undone: the value from before the write is back"
            if undone
            else "; ".join(found[:3]),
            names=names,
        )


def _bits(snapshot: Snapshot, name: str) -> bytes | None:
    record = snapshot.records.get(name)
    return record.bits if record else None


def _add_scalar(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def _data_add_scalar(weight: torch.Tensor) -> None:
    weight.data.add_(1)


def _fill(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.fill_(3)


def _copy_all(weight: torch.Tensor) -> None:
    new = torch.full(weight.shape, 3.0, dtype=weight.dtype)
    with torch.no_grad():
        weight.copy_(new)


def _one_element(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[(0,) * weight.dim()] = 3


def _data_one_element(weight: torch.Tensor) -> None:
    weight.data[(0,) * weight.dim()] = 3


def _new_data(weight: torch.Tensor) -> None:
    weight.data = torch.full(weight.shape, 3.0, dtype=weight.dtype, device=weight.device)


PARKED_WRITES = {
    "add_ of a scalar": _add_scalar,
    "data.add_ of a scalar": _data_add_scalar,
    "fill_": _fill,
    "copy_": _copy_all,
    "one element": _one_element,
    "one element of data": _data_one_element,
    "data =": _new_data,
}


@promise(
    12,
    "a write to a parked weight reaches it or raises; it never vanishes and never changes another weight",
    cause="""the write goes to the placeholder: to nothing where it has no elements, to every weight that shares it
        where it has one""",
    reports=("sgl-project/sglang/pull/16298", "sgl-project/sglang/pull/18883", "huggingface/diffusers/pull/9823"),
    variants=PARKED_WRITES,
)
def check_a_write_while_parked_is_not_lost(case: Case, write: Callable[[torch.Tensor], None]) -> None:
    names = case.plain_weights()
    if not names:
        raise NotApplicable("no floating-point weight that is alone in its storage")
    name = names[0]
    expected = case.module.get_parameter(name).detach().cpu().clone()
    true_shape = expected.shape
    write(expected)
    case.park()
    weight = case.module.get_parameter(name)

    def act() -> None:
        if write is _copy_all or write is _new_data:  # somebody who knows the shape of the weight
            new = torch.full(true_shape, 3.0, dtype=expected.dtype)
            with torch.no_grad():
                if write is _copy_all:
                    weight.copy_(new)
                else:
                    weight.data = new.to(case.device.device)
        else:
            write(weight)

    refused = case.attempt(f"write to {name} while parked", act)
    late = case.attempt("restore", case.parkable.restore)
    if late is not None:
        return  # refused at restore
    if refused is None:
        case.expect_value(name, expected, written="the write while parked")
    found = [line for line in case.changes() if refused or line.split(":")[0] != name]
    if found:
        raise Broken(
            expected="no weight changes that was not written to"
            if refused is None
            else "a refused write changes nothing",
            seen="; ".join(found[:3]),
            names=[line.split(":")[0] for line in found],
        )
