"""What a weight answers while only its host copy exists.

A parked weight stays the same object: ``torch.nn.Parameter`` and its subclasses can change class in place, as torch's
own ``UninitializedParameter`` does. While parked it *tells the truth* about its value and refuses to compute:

* shape, strides, counts: those of the weight; device, ``requires_grad``, ``grad``, hooks: its own, unchanged;
* ``detach()`` and ``.data``: the host copy itself, so ``state_dict`` reads the real values and a write through it
  reaches the weight; ``copy_`` writes there too, so ``load_state_dict`` takes effect;
* ``.to(dtype)``, ``.to(device)``: a parked tensor that will be restored as that; ``.cpu()``: the real values;
* ``.data = x``: ``x`` is the weight from now on, and the old host copy goes;
* deepcopy and pickle: an independent tensor on the device, as if the weight had been resident;
* anything else: ``WeightsParkedError``, before a kernel can see the placeholder. A streamed weight that is used apart
  from the forward of its layer is loaded instead, with its layer.

Torch asks no class about a few functions: ``torch.func`` transforms and DLPack capsules see the placeholder, which has
no elements.

So does a tensor *inside* a wrapper. The wrapper works below torch functions, so there is no placeholder in it, but a
tensor without bytes that answers the same in ``__torch_dispatch__``; only ``detach()`` is a parked tensor too, of the
same bytes, so that a wrapper can be detached.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from park_core.errors import WeightsParkedError
from park_core.host_copy import HostCopy
from park_core.storage import GroupState, StorageGroup, View, bytes_of, group_of, settle
from park_core.wrappers import swap_contents

__all__ = ["ParkedTensor", "hide", "is_parked", "parked_class", "parked_group", "show", "truth"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Torch functions and attributes, by name: what a parked tensor answers as the object that it is, ...
_OWN = _names("""
    device is_cuda is_cpu is_meta is_xpu is_mps get_device dtype layout is_floating_point is_complex is_signed is_sparse
    is_quantized is_nested is_mkldnn is_shared is_inference is_leaf requires_grad requires_grad_ grad grad_fn
    retains_grad register_hook register_post_accumulate_grad_hook _backward_hooks _post_accumulate_grad_hooks _version
    _use_count name names _is_view _base _typed_storage _has_compatible_shallow_copy_type __hash__
""")
# ... what it answers as the weight that it stands for, ...
_METADATA = _names("""
    shape size stride numel nelement nbytes itemsize element_size dim ndim ndimension __len__ is_contiguous
    storage_offset is_non_overlapping_and_dense dim_order
""")
# ... and what makes a weight of another kind of it.
_CONVERSIONS = _names("to _to_copy type type_as float double half bfloat16 int long short char byte bool cpu cuda xpu")


class Parked(NamedTuple):
    """What a parked tensor knows about itself."""

    group: StorageGroup
    view: View
    placeholder: Tensor  # shared; held here so that it lives as long as somebody shows it


class ParkedTensor(Tensor):
    """Mixed into the class of a weight while it is parked; see the module's docstring."""

    __slots__ = ()
    _parked: Parked

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _answer(_name_of(func), func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Asked only of a tensor inside a wrapper."""
        return _answer(_name_of(func), func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return _expose(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _replace(self, value)

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Torch asks no class about this method, nor about the next one."""
        return _computed("set_", Tensor.set_, (self, *args), kwargs)  # type: ignore[no-any-return]

    def as_subclass(self, cls: type[Any]) -> Any:
        return _computed("as_subclass", Tensor.as_subclass, (self, cls), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _independent(self)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _independent(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        group, view, _ = self._parked
        return f"<{view.name!r} of {group.component!r}: parked, {tuple(view.shape)}, {self.dtype}, {self.device}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _answer(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the module's docstring says, for an operation with a parked tensor among its arguments."""
    first = args[0] if args else None
    with torch._C.DisableTorchFunctionSubclass():
        if name in _OWN:
            return func(*args, **kwargs)
        if isinstance(first, ParkedTensor):
            if name in _METADATA:
                return func(truth(first), *args[1:], **kwargs)
            if name == "untyped_storage":
                return func(first._parked.placeholder)
            if name in ("detach", "alias"):
                return _alias(first) if first._parked.view.inner else _expose(first)
            if name == "clone" and first._parked.view.inner:  # how a wrapper is copied
                return _independent(first)
            if name == "copy_":
                func(_expose(first), *(truth(a) if is_parked(a) else a for a in args[1:]), **kwargs)
                return first
            if name in _CONVERSIONS and len(args) + len(kwargs) > (name in ("to", "type", "type_as")):
                return _converted(first, func, args[1:], kwargs)
    return _computed(name, func, args, kwargs)


def _computed(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What comes of an operation that needs the bytes on the device, if they can come."""
    for tensor in list(_parked_among([*args, *kwargs.values()])):
        if not is_parked(tensor):  # it came with the layer of another one
            continue
        if (load := tensor._parked.group.load) is not None:
            load()
        if is_parked(tensor):
            raise _refusal(name, tensor)
    return func(*args, **kwargs)


def is_parked(tensor: object) -> bool:
    """Does only the host copy of this tensor exist?"""
    return isinstance(tensor, ParkedTensor)


def parked_group(tensor: Tensor) -> StorageGroup | None:
    """The group that a parked tensor belongs to; None for any other tensor."""
    return tensor._parked.group if isinstance(tensor, ParkedTensor) else None


def truth(tensor: Tensor) -> Tensor:
    """The host copy of a parked tensor, seen as the tensor sees its device bytes. Shares memory with it."""
    group, view, _ = tensor._parked  # type: ignore[attr-defined]
    return view.over(group.host.storage)  # type: ignore[no-any-return]


def _expose(tensor: Tensor) -> Tensor:
    """Give the host copy out of our hands, to be read or written: what is known of its bytes may be wrong from now on,
    and a transfer that is under way may miss what is written."""
    group = tensor._parked.group  # type: ignore[attr-defined]
    group.exposed, group.host.fingerprint = True, None
    return truth(tensor)


def _alias(tensor: ParkedTensor) -> Tensor:
    """Another parked tensor over the same bytes: a detached wrapper must be on the device of the first one."""
    group, view, shown = tensor._parked
    alias = torch.empty_like(shown)
    seen = replace(view, ref=weakref.ref(alias))
    hide_one(alias, group, seen)
    group.views = [known for known in group.views if known.ref() is not None] + [seen]
    return alias


def hide(group: StorageGroup) -> None:
    """RESIDENT or half hidden -> PARKED: every member shows the placeholder. Needs the host copy; allocates nothing."""
    assert group.host is not None
    for view, tensor in group.tensors():
        hide_one(tensor, group, view)
    group.state = GroupState.PARKED


def hide_one(tensor: Tensor, group: StorageGroup, view: View) -> None:
    shown = placeholder(group.device, view.dtype, view.inference)
    cls = type(tensor) if isinstance(tensor, ParkedTensor) else parked_class(type(tensor))
    if view.inner:
        swap_contents(tensor, _without_bytes(cls, view, group.device))
    tensor._parked = Parked(group, view, shown)  # type: ignore[attr-defined]
    if tensor.__class__ is not cls:
        tensor.__class__ = cls
    if not view.inner:  # last, and on the way back first: no thread ever sees a placeholder that does not refuse
        _set_data(tensor, shown)


def show(group: StorageGroup, memory: Tensor | torch.UntypedStorage) -> None:
    """PARKED or half shown -> RESIDENT: every member is a view of these bytes again, and a normal tensor."""
    storage = memory.untyped_storage() if isinstance(memory, Tensor) else memory
    whole = group.whole
    for view, tensor in group.tensors():
        if view is whole and isinstance(memory, Tensor) and view.describes(memory) and not view.inner:
            _unveil(tensor, view, memory)
        else:
            _unveil(tensor, view, view.over(storage))
    settle(group, storage)
    group.state = GroupState.RESIDENT


def _unveil(tensor: Tensor, view: View, value: Tensor) -> None:
    """Make it a normal tensor with the bytes of ``value``, whether it is parked or half of it."""
    if not view.inner:
        _set_data(tensor, value)
    if isinstance(tensor, ParkedTensor):
        tensor.__class__ = type(tensor).__mro__[2]
        del tensor._parked
    if view.inner:
        swap_contents(tensor, value)


_placeholders: weakref.WeakValueDictionary[tuple[torch.device, torch.dtype, bool], Tensor] = (
    weakref.WeakValueDictionary()
)


def placeholder(device: torch.device, dtype: torch.dtype, inference: bool = False) -> Tensor:
    """No elements, no bytes; one per (device, dtype), shared by all parked tensors of that kind while there are any."""
    found = _placeholders.get((device, dtype, inference))
    if found is None:
        with torch.inference_mode(inference):
            found = _placeholders[device, dtype, inference] = torch.empty(0, dtype=dtype, device=device)
    return found


@functools.cache
def parked_class(cls: type) -> type:
    """The class of a parked tensor whose own class is ``cls``."""
    return type(f"Parked{cls.__name__}", (ParkedTensor, cls), {"__slots__": (), "__module__": cls.__module__})


def _without_bytes(cls: type, view: View, device: torch.device) -> Tensor:
    """A tensor that looks like the view, holds no memory, and leaves every operation to ``cls``."""
    with torch.inference_mode(view.inference):
        return Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride,
            storage_offset=view.offset,
            dtype=view.dtype,
            device=device,
            storage_size=0,
        )


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value`` for parked tensors too."""
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]


def _name_of(func: Callable[..., Any]) -> str:
    """``shape`` for the getter of ``Tensor.shape``, ``add_`` for ``Tensor.add_`` and ``torch.ops.aten.add_.Tensor``."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name.partition(".")[0]


def _parked_among(values: Iterable[Any]) -> Iterator[ParkedTensor]:
    for value in values:
        if isinstance(value, ParkedTensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _parked_among(value)
        elif isinstance(value, Mapping):
            yield from _parked_among(value.values())


def _refusal(operation: str, tensor: ParkedTensor) -> WeightsParkedError:
    group, view, _ = tensor._parked
    return WeightsParkedError(group.component, view.name, operation=operation, remedy=remedy(group))


def remedy(group: StorageGroup) -> str:
    return "load_all_layers()" if group.streamed else "restore_non_layer_weights()"


def _converted(tensor: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """What ``.to(...)`` makes of a parked tensor: itself, a parked tensor of another kind, or the values on the CPU."""
    group, view, _ = tensor._parked  # type: ignore[attr-defined]
    probe = func(torch.empty(0, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    same = probe.device == tensor.device and probe.dtype == tensor.dtype
    if same and not kwargs.get("copy") and _name_of(func) != "_to_copy":
        return tensor
    values = truth(tensor).to(dtype=probe.dtype, copy=True)
    if probe.device.type == "cpu":  # so that `.data =` can tell a move from a write
        _settle(group.component, values, moved=True)
        return values
    return _parked_from(probe, values, group, view, probe.device)


def _parked_from(tensor: Tensor, values: Tensor, like: StorageGroup, seen: View, device: torch.device) -> Tensor:
    """Make ``tensor`` a parked tensor whose value is ``values`` (host), alone in a group of its own."""
    view = replace(View.of(values, seen.name), ref=weakref.ref(tensor), inner=seen.inner)
    host = HostCopy(values.untyped_storage())
    group = StorageGroup(like.component, device, host.storage.nbytes(), GroupState.PARKED, [view], host)
    group.streamed, group.load = like.streamed, like.load
    hide_one(tensor, group, view)
    return tensor


def _replace(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value`` while parked: the tensor leaves its group, and ``value`` is the truth from now on."""
    group, view, _ = tensor._parked  # type: ignore[attr-defined]
    group.views.remove(view)
    if isinstance(value, ParkedTensor):  # a conversion of this or another parked tensor
        _parked_from(tensor, truth(value), group, view, value.device)
        return
    known = group_of(value.untyped_storage())
    if value.device.type == "cpu" != group.device.type and not (known and known.moved):  # a new value, on the host
        _parked_from(tensor, value, group, view, group.device)
        return
    _unveil(tensor, view, value.detach())
    if known is None:
        _settle(group.component, value)


def _settle(component: str, value: Tensor, *, moved: bool = False) -> None:
    storage = value.untyped_storage()
    settle(StorageGroup(component, value.device, storage.nbytes(), moved=moved), storage)


def _independent(tensor: Tensor) -> Tensor:
    """A resident tensor of the same class, values, layout, attributes, that shares nothing with ``tensor``."""
    group, view, _ = tensor._parked  # type: ignore[attr-defined]
    assert group.host is not None
    with torch.inference_mode(view.inference):
        storage = bytes_of(group.host.storage).to(group.device, copy=True).untyped_storage()
        result: Tensor = view.over(storage).as_subclass(type(tensor).__mro__[2])
        result.requires_grad_(tensor.requires_grad)
    result.__dict__.update({k: v for k, v in vars(tensor).items() if k != "_parked"})
    return result
