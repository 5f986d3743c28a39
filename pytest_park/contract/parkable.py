"""`Parkable`: all that the contract knows about a module that can be parked, whoever wrote the code that parks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(slots=True, kw_only=True)
class Report:
    """What an implementation says that one park did. *bytes_freed* is device bytes; *skipped* names what was left."""

    bytes_freed: int
    skipped: Sequence[tuple[str, str]] = ()


def _default_report(result: Any) -> Report | None:
    freed = getattr(result, "bytes_freed", None)
    if not isinstance(freed, int):
        return None
    return Report(bytes_freed=freed, skipped=[(str(left[0]), str(left[1])) for left in getattr(result, "skipped", ())])


_VERBS = {"park": "park_non_layer_weights", "restore": "restore_non_layer_weights"}


@dataclass(slots=True)
class Parkable:
    """A module with the calls that park and restore it. Everything but the first two fields has a default.

    Each test needs a *new* module: build it anew in the fixture or factory that returns this.
    """

    module: nn.Module
    #: Arguments of the forward: a tensor, a tuple of positional ones, a mapping of named ones, or a callable giving
    #: those.
    example_inputs: Any = ()
    #: Parks. Default: the module's ``park_non_layer_weights``.
    park: Callable[[], Any] = None  # type: ignore[assignment]  # never None where `fault` is empty, like the next three
    #: Restores. Default: the module's ``restore_non_layer_weights``.
    restore: Callable[[], Any] = None  # type: ignore[assignment]
    #: Names of the module lists whose layers are streamed one by one and never parked. Default: its ``layer_names``.
    streamed: Sequence[str] = None  # type: ignore[assignment]
    #: How the component is used when not by calling it: ``forward(module, *inputs)``, such as ``vae.decode``.
    forward: Callable[..., Any] | None = None
    #: The component's device. Default: where its weights are.
    device: torch.device = None  # type: ignore[assignment]
    #: The fake accelerator, if it is one. Without it the checks that inject faults do not apply. Default: the one of
    #: ``pytest_park.fakegpu`` that *device* is on.
    fake_device: Any = None

    # -- abilities that not every implementation has; what is not declared is skipped, with a reason ------------------

    #: Makes another module parkable in the same way: ``adopt(module, example_inputs, streamed) -> Parkable``. The
    #: contract then tries what this module lacks (ties, views, odd dtypes ...) on small modules of its own.
    adopt: Callable[[nn.Module, Any, Sequence[str]], Parkable] | None = None
    #: The share of the headroom that the weights must exceed to be parked, where there is such a rule (0.1 upstream).
    significance: float | None = None
    #: Parks if the next stage, which needs so many bytes, would not fit: ``park_for(need)``.
    park_for: Callable[[int], Any] | None = None
    #: Begin and end of a use, and the end of a request (which ends the use a second time).
    begin_use: Callable[[], Any] | None = None
    finish_use: Callable[[], Any] | None = None
    finish_request: Callable[[], Any] | None = None
    #: Reads a `Report` out of what ``park`` returned. Default: its ``bytes_freed`` and ``skipped``, where it has them.
    report: Callable[[Any], Report | None] = _default_report
    #: Device bytes of the component's weights as the implementation counts them.
    weight_bytes: Callable[[], int] | None = None
    #: Writes new values into weights, wherever they are now (refit): ``update({name: tensor, ...})``. It must refuse a
    #: value of another shape. Default: the module's ``update_cpu_weights``, where it has one.
    update: Callable[[Mapping[str, torch.Tensor]], Any] | None = None
    #: Bytes of the host copies of its non-layer weights, as the implementation counts them.
    host_bytes: Callable[[], int] | None = None
    #: Whether host copies are kept after restore. None: not stated.
    keeps_host_copies: bool | None = None
    #: Ways to end parking for good (disable, remove, finalise, switch the mode off), and to set it up anew.
    ends: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    reconfigure: Callable[[], Any] | None = None
    #: Whether pinned host copies were asked for.
    pinned: bool = False

    def __post_init__(self) -> None:
        for verb, default in _VERBS.items():
            if self._unset(verb):
                setattr(self, verb, getattr(self.module, default, None))
        if self._unset("update"):
            self.update = getattr(self.module, "update_cpu_weights", None)
        if not _is_a(nn.Module, self.module):
            return
        if self._unset("streamed"):
            names = getattr(self.module, "layer_names", ())
            known = dict(self.module.named_modules())
            self.streamed = tuple(name for name in names if name in known) if isinstance(names, list | tuple) else ()
        if self._unset("device"):
            self.device = device_of(self.module)
        if self._unset("fake_device") and self.device.type not in ("cpu", "meta"):
            card_of = getattr(torch.get_device_module(self.device), "card_of", None)
            self.fake_device = None if card_of is None else card_of(self.device)

    def _unset(self, name: str) -> bool:
        return getattr(self, name) is None

    def fault(self) -> str:
        """What is wrong with what was given here, for whoever gave it; empty if nothing is.

        It is asked for by the first check and not raised here: a fixture that raises is an error in each of the tests.
        """
        kind = type(self.module).__name__
        if not _is_a(nn.Module, self.module):
            return f"Parkable(module=...) is {kind}, not a torch.nn.Module"
        for verb, default in _VERBS.items():
            call = getattr(self, verb)
            if call is None:
                return f"{kind} has no method {default}: pass Parkable({verb}=...) with the call that {verb}s it"
            if not callable(call):
                return f"Parkable({verb}=...) is {type(call).__name__}, which cannot be called"
        given = self.example_inputs
        if not (isinstance(given, torch.Tensor | Mapping | list | tuple) or callable(given)):
            return (
                f"Parkable(example_inputs=...) is {type(given).__name__}: give a tensor, a tuple of positional "
                "arguments, a mapping of named ones, or a callable that returns those"
            )
        known = dict(self.module.named_modules())
        for name in self.streamed:
            if name not in known:
                return f"Parkable(streamed=...) names {name}, and {kind} has no submodule of that name"
        if self.significance is not None and not 0 < self.significance <= 1:
            return f"Parkable(significance={self.significance}): it is a share of the headroom, above 0 and at most 1"
        if not _is_a(Mapping, self.ends):
            return f"Parkable(ends=...) is {type(self.ends).__name__}, not a mapping of names to calls"
        return ""

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the forward, as (positional, named)."""
        given = self.example_inputs() if callable(self.example_inputs) else self.example_inputs
        if isinstance(given, torch.Tensor):
            return (given,), {}
        if isinstance(given, Mapping):
            return (), dict(given)
        return tuple(given), {}

    def call(self) -> Any:
        """One use of the component on its example inputs."""
        positional, named = self.inputs()
        if self.forward is not None:
            return self.forward(self.module, *positional, **named)
        return self.module(*positional, **named)


def _is_a(kind: type, given: object) -> bool:
    """Whether what was given is what the annotation says: not everybody has a type checker."""
    return isinstance(given, kind)


def device_of(module: nn.Module) -> torch.device:
    """The first device of the module's tensors that is not the host; the host if there is none."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cpu")
