"""What a component is made of: its storage groups, who owns them, and what cannot be moved."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from park_core.parked_tensor import is_parked, parked_group
from park_core.report import Skipped
from park_core.storage import StorageGroup, View, group_of, settle
from park_core.wrappers import inner_tensors, size_of, wraps_others

__all__ = [
    "Member",
    "Survey",
    "groups_of",
    "needed_by_autograd",
    "other_holders",
    "owned_tensors",
    "plain_tensors",
    "survey",
    "viewed_elsewhere",
]


class Member(NamedTuple):
    """A tensor in the tree of a component, under one of its names; or, ``inner``, one inside such a tensor."""

    name: str
    tensor: Tensor
    owner: nn.Module
    is_buffer: bool
    inner: bool = False

    def parts(self) -> list[Member]:
        """The tensors that hold its bytes: mostly itself."""
        if type(self.tensor) in (nn.Parameter, Tensor) or is_parked(self.tensor):
            return [self]
        found = inner_tensors(self.name, self.tensor)
        return [self._replace(name=name, tensor=part, inner=part is not self.tensor) for name, part in found]


@dataclass(slots=True)
class Survey:
    """The component as it is now. It holds storages: drop it before measuring what was freed.

    Attributes:
        resident: groups on a device (or on the host, for a component that was never placed), with their storage.
        parked: groups of which only the host copy exists.
        members: of each group, in the tree of the component.
        buffers: groups made of buffers only.
        wrappers: tensors that wrap others, whose bytes are in groups.
        skipped: tensors that cannot move as bytes of a storage, and why.
        refusal: why the component must not be touched at all; empty if it may.
    """

    resident: dict[StorageGroup, torch.UntypedStorage] = field(default_factory=dict)
    parked: list[StorageGroup] = field(default_factory=list)
    members: dict[StorageGroup, list[Member]] = field(default_factory=dict)
    buffers: set[StorageGroup] = field(default_factory=set)
    wrappers: list[Tensor] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    refusal: str = ""

    @property
    def owners(self) -> dict[StorageGroup, list[nn.Module]]:
        """The modules that own members of a group."""
        return {group: [member.owner for member in members] for group, members in self.members.items()}


def owned_tensors(component: nn.Module) -> Iterator[Member]:
    """Every parameter and buffer under every one of its owners: a tied weight comes more than once."""
    for path, module in component.named_modules():
        for is_buffer, owned in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in owned.items():
                if tensor is not None:
                    yield Member(f"{path}.{name}" if path else name, tensor, module, is_buffer)


def plain_tensors(component: nn.Module) -> list[Skipped]:
    """Tensors on a device that nobody moves, so they are named: mere attributes of a module, or of a weight.

    A weight of a class of its own may have its scales in an attribute, as those of bitsandbytes in ``quant_state``.
    """
    found = []
    for path, module in component.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found.append((prefix + name, value, "a plain attribute, neither parameter nor buffer"))
        for name, weight in module._parameters.items():
            if weight is None or type(weight) is nn.Parameter or (wraps_others(weight) and not is_parked(weight)):
                continue
            for attribute, value in vars(weight).items():
                inside = {"": value} if isinstance(value, Tensor) else getattr(value, "__dict__", {})
                for key, part in inside.items():
                    if isinstance(part, Tensor):
                        whole = f"{prefix}{name}.{attribute}" + (f".{key}" if key else "")
                        found.append((whole, part, "an attribute of a weight"))
    return [Skipped(name, why, size_of(t)) for name, t, why in found if t.device.type not in ("cpu", "meta")]


def survey(component: nn.Module, name: str) -> Survey:
    """Look at every tensor of the component once. Changes nothing, allocates nothing."""
    found = Survey(refusal=_fsdp_refusal(component))
    by_storage: dict[torch.UntypedStorage, list[Member]] = {}
    for owned in owned_tensors(component):
        found.refusal = found.refusal or _refusal(owned)
        members = owned.parts()
        if members[0].inner:
            found.wrappers.append(owned.tensor)
        for member in members:
            tensor = member.tensor
            if (group := parked_group(tensor)) is not None:
                found.members.setdefault(group, []).append(member)
            elif reason := _immovable(member):
                found.skipped.append(Skipped(member.name, reason, size_of(tensor)))
            elif not (storage := tensor.untyped_storage()):
                found.skipped.append(Skipped(member.name, "it is empty"))
            else:
                by_storage.setdefault(storage, []).append(member)
                if (base := tensor._base) is not None:  # autograd keeps the base of a view, and its bytes, alive
                    by_storage[storage].append(member._replace(name="", tensor=base))
    found.parked += found.members
    for storage, members in by_storage.items():
        group = _group_in(storage, name)
        _update_views(group, storage, members)
        found.resident[group] = storage
        found.members[group] = members
        if all(member.is_buffer for member in members):
            found.buffers.add(group)
    return found


def groups_of(component: nn.Module, name: str, *, buffers: bool) -> tuple[set[StorageGroup], set[StorageGroup]]:
    """The resident and the parked groups that the component's weights are in; ``buffers``: those of buffers, too.

    It tells sizes, and nothing that stands in the way of a park, at a fifth of the cost of a :func:`survey`. It looks
    at every weight and its storage anew, since nothing tells of a weight that was replaced, tied or given other data.
    """
    resident, parked = set(), set()
    strided = torch.strided
    for module in component.modules():
        for owned in (module._parameters, module._buffers) if buffers else (module._parameters,):
            for tensor in owned.values():
                if type(tensor) is nn.Parameter and tensor.layout is strided:  # nearly always
                    storage = tensor.untyped_storage()
                    group = group_of(storage)
                    if group is None or group.nbytes != storage.nbytes():
                        group = _group_in(storage, name)
                    resident.add(group)
                elif tensor is not None:
                    for member in Member("", tensor, module, is_buffer=owned is module._buffers).parts():
                        if (group := parked_group(member.tensor)) is not None:
                            parked.add(group)
                        elif not _immovable(member):
                            resident.add(_group_in(member.tensor.untyped_storage(), name))
    return resident, parked


def _group_in(storage: torch.UntypedStorage, component: str) -> StorageGroup:
    """The group that is resident in ``storage``. It goes on record if it was not, or if the storage was resized."""
    group = group_of(storage)
    if group is None or group.nbytes != storage.nbytes():
        group = StorageGroup(component, storage.device, storage.nbytes())
        settle(group, storage)
    return group


def _update_views(group: StorageGroup, storage: torch.UntypedStorage, members: list[Member]) -> None:
    """Record the views of a group as they are now. Members that another component owns are kept."""
    known = list(group.tensors())
    if len(members) == 1 and len(known) <= 1 and (not known or known[0][1] is members[0].tensor):  # nearly always
        name, tensor, _, _, inner = members[0]
        if not (known and len(group.views) == 1 and known[0][0].is_still(tensor, name)):
            group.views = [View.of(tensor, name, inner)]
        return
    tensors: dict[int, Member] = {}
    for member in members:
        tensors.setdefault(id(member.tensor), member)  # a tied weight goes by its first name
    elsewhere = [
        view
        for view, tensor in known
        if id(tensor) not in tensors and parked_group(tensor) is None and tensor.untyped_storage() is storage
    ]
    group.views = [View.of(member.tensor, member.name, member.inner) for member in tensors.values()] + elsewhere


def viewed_elsewhere(group: StorageGroup, storage: torch.UntypedStorage) -> bool:
    """Does something that is not a member hold these bytes? Then moving the members would free nothing.

    Each tensor over a storage counts once, and so does the Python object ``storage``.
    """
    return torch._C._storage_Use_Count(storage._cdata) > len(group.views) + 1


def other_holders(tensor: Tensor) -> int:
    """How many hold the tensor beside its Python object: views of it, an autograd graph (its AccumulateGrad node, or
    what a backward will need), other C++ code such as a script module."""
    return int(tensor._use_count()) - 1  # type: ignore[attr-defined]


def needed_by_autograd(group: StorageGroup) -> bool:
    """Does a graph (or other C++ code) hold a member? Then a backward would meet a placeholder.

    The views of a member that are in the group themselves do not count.
    """
    members = [tensor for _, tensor in group.tensors()]
    for tensor in members:
        if (holders := other_holders(tensor)) and holders > sum(other._base is tensor for other in members):
            return True
    return False


def _immovable(member: Member) -> str:
    """Why this tensor is not a strided view of the bytes of one storage."""
    tensor = member.tensor
    if type(tensor) is not nn.Parameter and wraps_others(tensor):
        return f"its class {type(tensor).__name__} wraps other tensors and does not tell which"
    if tensor.is_meta or nn.parameter.is_lazy(tensor):
        return "it has no data"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return f"its layout ({tensor.layout}, quantized, conjugated or negated) is more than bytes and strides"
    if member.inner and (tensor.grad_fn or tensor.grad is not None or other_holders(tensor)):
        return "it is inside a wrapper, and autograd holds it"
    return ""


def _refusal(member: Member) -> str:
    """Why a component with this tensor must not be parked at all."""
    tensor = member.tensor
    if member.is_buffer or is_parked(tensor):
        return ""
    if tensor.is_meta:
        return f"{member.name!r} is a meta tensor: it has no data; load the component first"
    if tensor.grad is not None:
        return f"{member.name!r} has a gradient; set it to None first (zero_grad)"
    if tensor.requires_grad and other_holders(tensor):
        return f"a backward pass through {member.name!r} is pending"
    return ""


def _fsdp_refusal(component: nn.Module) -> str:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not in use
    if fsdp is not None and any(
        isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)) for module in component.modules()
    ):
        return "it is managed by FSDP, which moves its shards itself"
    return ""
