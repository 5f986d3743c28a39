"""Who keeps device memory alive: the tensors over each live storage, by the names under which they can be found."""

from __future__ import annotations

import functools
import gc
import inspect
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch

from pytest_park.sizes import format_bytes

#: How many references away a name is looked for: from a parameter, by its module in a list of a cache, it is seven.
_FARTHEST = 8
#: How many objects of one level are looked at; what so many refer to is no cache of anybody's.
_WIDEST = 10_000
_CONTAINERS = ("a dict", "a list", "a tuple", "a set", "a frozenset", "a deque", "a cell", "a function")


@dataclass(frozen=True, slots=True)
class Holder:
    """A live storage of *bytes* bytes as they were asked for, and the *names* of those who hold tensors over it."""

    bytes: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.names) or "nobody that Python can name (autograd, or an extension)"
        return f"{format_bytes(self.bytes)} held by {names}"


def holders(storages: Iterable[tuple[int, torch.UntypedStorage]]) -> list[Holder]:
    """For each of *storages*, with its bytes, who holds it. Walks all objects of Python: for reports, not for loops."""
    wanted = {storage._cdata: nbytes for nbytes, storage in storages}
    over: dict[int, list[int]] = {key: [] for key in wanted}
    search = _Search()
    for item in gc.get_objects():
        if not issubclass(type(item), torch.Tensor) or item.device.type != "fakegpu":
            continue
        if item.is_leaf and item.grad is not None:
            search.add(item.grad, of=item)
        if type(item).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:  # a wrapper has no storage of its own
            key = item.untyped_storage()._cdata
            if key in over:
                over[key].append(search.add(item))
    del item
    names = search.names()
    return [
        Holder(nbytes, tuple(dict.fromkeys(name for tensor in over[key] for name in names[tensor])))
        for key, nbytes in wanted.items()
    ]


@dataclass(slots=True)
class _Found:
    """An object on the way up from the tensors: how each of them is written after it, like ``['key'].weight``."""

    item: Any
    paths: dict[int, str] = field(default_factory=dict)


class _Search:
    """From tensors up to what refers to them, level by level, until somebody has a name: a variable of a module, of a
    class, or of a function. Nearer names win."""

    def __init__(self) -> None:
        self._level: dict[int, _Found] = {}
        self._described: dict[int, str] = {}
        self._named: dict[int, list[str]] = {}
        self._unnamed: dict[int, str] = {}

    def add(self, tensor: torch.Tensor, of: torch.Tensor | None = None) -> int:
        """Look for *tensor*; it may be the gradient *of* another, which holds it in C++, unseen by Python."""
        key = id(tensor)
        self._level.setdefault(key, _Found(tensor)).paths[key] = ""
        if of is not None:
            self._level.setdefault(id(of), _Found(of)).paths[key] = ".grad"
        self._described[key] = f" ({type(tensor).__name__}{tuple(tensor.shape)})"
        return key

    def names(self) -> dict[int, list[str]]:
        """By identity of the tensors that were added: their names, or at least in what they are."""
        seen: set[int] = set()
        for _ in range(_FARTHEST):
            seen.update(self._level)
            self._look_into_running_functions()
            self._climb(seen)
            if not self._level or len(self._level) > _WIDEST:
                break
        self._level = {}
        return {
            key: self._named.get(key) or ([self._unnamed[key] + what] if key in self._unnamed else [])
            for key, what in self._described.items()
        }

    # Loops and no comprehensions below: those would refer to the objects too.

    def _climb(self, seen: set[int]) -> None:
        above: dict[int, _Found] = {}
        items = tuple([found.item for found in self._level.values()])
        ours = {id(found) for found in self._level.values()} | _running_frames()
        ours.add(id(items))  # from Python 3.13 on ``gc`` gives the tuple of its own arguments, too
        for referrer in gc.get_referrers(*items):
            if id(referrer) in seen or id(referrer) in ours:
                continue
            place = _place(referrer)
            for held, step in _references(referrer):
                found = self._level.get(id(held))
                for tensor, path in found.paths.items() if found is not None else ():
                    if place is not None:
                        self._name(tensor, _variable(step + path), place)
                        continue
                    above.setdefault(id(referrer), _Found(referrer)).paths.setdefault(tensor, step + path)
                    if self._unnamed.get(tensor, _CONTAINERS[0]).startswith(_CONTAINERS):
                        self._unnamed[tensor] = f"a {type(referrer).__name__}{_attributes(step + path)}"
        self._level = {}
        for key, found in above.items():
            for tensor in found.paths.keys() & self._named.keys():
                del found.paths[tensor]
            if found.paths:
                self._level[key] = found

    def _name(self, tensor: int, path: str, place: str) -> None:
        name = f"{path} of {place}".removeprefix(" of ") + self._described[tensor]
        names = self._named.setdefault(tensor, [])
        if name not in names:
            names.append(name)

    def _look_into_running_functions(self) -> None:
        """Their variables, in all threads; a function that runs is no referrer for ``gc``."""
        threads = {thread.ident: thread for thread in threading.enumerate()}
        for ident, top in sys._current_frames().items():
            where = f" in thread {threads[ident].name!r}" if ident in threads and ident != threading.get_ident() else ""
            frame: FrameType | None = top
            while frame is not None:
                if frame.f_globals.get("__name__") != __name__ and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                    names = frame.f_locals
                    for name, value in names.items():
                        found = self._level.get(id(value))
                        for tensor, path in found.paths.items() if found is not None else ():
                            self._name(tensor, _variable(name + path), f"{frame.f_code.co_qualname}(){where}")
                    if type(names) is dict:  # before Python 3.13 a copy that the frame keeps, and with it all values
                        names.clear()
                frame = frame.f_back
        del top  # perhaps this very function, which would then hold itself


def _running_frames() -> set[int]:
    found = set()
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            found.add(id(frame))
            frame = frame.f_back
    del top  # perhaps this very function, which would then hold itself
    return found


def _place(holder: Any) -> str | None:
    """How *holder* is called, if it is something that has names in it."""
    if type(holder) is dict:
        name = holder.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        return f"module {name}" if module is not None and vars(module) is holder else None
    if isinstance(holder, type):
        return f"class {holder.__qualname__}"
    if isinstance(holder, FunctionType):
        return f"function {holder.__qualname__}()"
    if isinstance(holder, functools._lru_cache_wrapper):
        return f"the cache of {holder.__wrapped__.__qualname__}()"
    if isinstance(holder, GeneratorType | CoroutineType):
        return f"{holder.__qualname__}(), which is suspended"
    if isinstance(holder, FrameType):
        return f"{holder.f_code.co_qualname}(), which a traceback keeps"
    return None


def _references(holder: Any) -> Iterator[tuple[Any, str]]:
    """What *holder* refers to, with how that is written after it."""
    if isinstance(holder, dict):
        for key, value in list(holder.items()):
            yield value, f"[{key!r}]"
    elif isinstance(holder, list | tuple | deque):
        for position, value in enumerate(list(holder)):
            yield value, f"[{position}]"
    elif isinstance(holder, FunctionType):
        for name in ("__closure__", "__defaults__", "__kwdefaults__", "__dict__"):
            yield getattr(holder, name), name
    elif isinstance(holder, GeneratorType | CoroutineType | FrameType):
        frame = (
            holder
            if isinstance(holder, FrameType)
            else getattr(holder, "gi_frame", None) or getattr(holder, "cr_frame", None)
        )
        for name, value in list(frame.f_locals.items()) if frame is not None else ():
            yield value, name
    else:
        for name in (name for kind in type(holder).__mro__ for name in _slots(kind)):
            yield getattr(holder, name, None), f".{name}"
        own = holder.__dict__ if type(getattr(holder, "__dict__", None)) is dict else {}
        for name, value in list(own.items()):  # values can stand in the object itself, without a dict
            yield value, f".{name}"
        for value in gc.get_referents(holder):
            yield value, "." if value is own or isinstance(holder, type) else ""


def _attributes(path: str) -> str:
    """*path* with the dicts of objects and of modules' parameters written as the attributes that they are."""
    path = re.sub(r"\.\['(\w+)'\]", r".\1", path)
    return re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", path)


def _variable(path: str) -> str:
    """*path* where it begins with a name."""
    return re.sub(r"^(?:\.|\['(\w+)'\])", r"\1", _attributes(path))


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
