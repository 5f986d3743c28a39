"""`Case`: one fresh parkable under one check, with the verbs that checks are written in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .device import Device
from .parkable import Parkable, Report
from .snapshot import Snapshot, TensorRecord, bits_of, inner_tensors, tensors_of
from .subclass import wraps_others
from .verdict import Broken, NotApplicable, Untestable, bytes_text, error_text


class Case:
    """A parkable in use, as it was before anything was done to it, and the history of what was done.

    A context manager: at its end the device has its memory back and no fault is armed. *repeats* says that the forward
    is known to give the same twice: it is the greater part of the work, and need be asked once for a kind of module.
    """

    def __init__(self, parkable: Parkable, about: str = "", *, repeats: bool = False) -> None:
        self.parkable = parkable
        self.history: list[str] = []
        #: Which module this is about, where it is not the user's own.
        self.about = about
        self._untouched = True
        _require_a_component(parkable)
        self.device = Device(parkable.device, parkable.fake_device)
        self.streamed = frozenset(map(id, streamed_parameters(parkable)))
        self.before = self.snapshot()  # before the forward: one that parks behind itself has severed views by then
        self.expected_output = self._first_outputs(repeats)
        self.device.synchronize()  # a layer that is still being prefetched may be read from here on
        self.bytes = sum(self.storages().values())

    def __enter__(self) -> Case:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.device.disarm()
        self.device.relieve()

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        return self.parkable.module

    def weights(self) -> dict[str, nn.Parameter]:
        """The non-layer weights on the device, each once, under its first name."""
        device = self.parkable.device
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if id(parameter) not in self.streamed and parameter.device == device
        }

    def float_weights(self) -> dict[str, nn.Parameter]:
        """Those that a writer can write to without asking what their dtype means."""
        return {
            name: weight
            for name, weight in self.weights().items()
            if weight.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
            and weight.numel()
            and not wraps_others(weight)
        }

    def plain_weights(self) -> list[str]:
        """Names of floating-point weights with one name and a storage of their own."""
        names = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
        by_id = {id(weight): name for name, weight in self.module.named_parameters()}
        shared = {name for group in self.before.groups() for name in group}
        return [
            name
            for name, weight in self.float_weights().items()
            if by_id[id(weight)] == name
            and names.count(name) == 1
            and name not in shared
            and "parametrizations" not in name
        ]

    def parked_weights(self) -> dict[str, nn.Parameter]:
        """Weights that are not where they were, under all their names: a reader that is refused counts as parked."""
        found = {}
        for name, weight in self.module.named_parameters(remove_duplicate=False):
            record = self.before.records.get(name)
            if record is None or not record.storage_bytes:
                continue
            try:
                storage = weight.untyped_storage()
                resident = (str(weight.device), storage.data_ptr()) == record.storage
            except Exception:
                resident = False
            if not resident:
                found[name] = weight
        return found

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The submodule that owns the parameter called *name*, and its name there."""
        path, _, leaf = name.rpartition(".")
        return self.module.get_submodule(path), leaf

    def storages(self) -> dict[int, int]:
        """Bytes of each device storage under the non-layer weights, by its address."""
        found = {}
        for name, weight in self.weights().items():
            for _, inner in inner_tensors(name, weight):
                storage = inner.untyped_storage()
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
        return found

    def snapshot(self) -> Snapshot:
        return Snapshot(self.module, self.streamed)

    def changes(self) -> list[str]:
        """How values differ from those at the start, one line each."""
        return self.before.differences(self.snapshot(), ("values",))

    # -- verbs --------------------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """Add to the history something that the check did to the module itself."""
        self.history.append(what)
        self._untouched = False

    def scarce(self, size: int | None = None, times: int = 1) -> None:
        """Make memory so scarce that parking *size* bytes (default: all weights) pays five times over.

        A promise of its own says that parking needs no memory; the other checks leave room for a small placeholder, and
        with *times* for more.
        """
        share = self.parkable.significance or 0.1
        size = self.bytes if size is None else size
        self.device.set_headroom(max(round(times * size / share / 5), 1))

    def park(self, *, must_free: bool = True) -> Any:
        """Park under scarcity. The first park must free something, or nothing can be tested."""
        first = not self.history and must_free
        self.scarce()
        before = self.device.bytes
        try:
            result = self._do("park", self.parkable.park)
        except Exception as error:
            if first:
                raise Untestable(f"the first park() raised {error_text(error)}") from error
            raise Broken(expected="park() returns", seen=error_text(error)) from error
        if first and self.device.bytes >= before and self.device.settled_bytes() >= before:
            raise Untestable(
                f"park() freed nothing: device bytes were {before:,} before and are {self.device.bytes:,} after, with "
                f"a headroom of {bytes_text(self.device.headroom)} for {bytes_text(self.bytes)} of weights. Does it "
                "park only in a mode that is off, or is the headroom that it sees not that of this device?"
            )
        return result

    def restore(self) -> Any:
        """Restore with room for it."""
        first = self.history == ["park"] and self._untouched
        self.device.relieve()
        try:
            return self._do("restore", self.parkable.restore)
        except Exception as error:
            if first:
                raise Untestable(f"the first restore() after the first park() raised {error_text(error)}") from error
            raise Broken(expected="restore() returns", seen=error_text(error)) from error

    def cycle(self) -> None:
        self.park()
        self.restore()

    def forward(self) -> list[torch.Tensor]:
        """The tensors of one use of the component; an exception of it is a broken promise."""
        try:
            with torch.no_grad():
                return flat_tensors(self._do("forward", self.parkable.call))
        except Exception as error:
            raise Broken(expected="the forward of the restored component runs", seen=error_text(error)) from error

    def attempt(self, label: str, action: Callable[[], Any]) -> BaseException | None:
        """Do something that may be refused; the exception if it was. Only real interrupts pass."""
        try:
            self._do(label, action)
        except BaseException as error:
            self.history[-1] += f" ({type(error).__name__})"
            return error
        return None

    def _do(self, label: str, action: Callable[[], Any]) -> Any:
        self.history.append(label)
        return action()

    def report(self, result: Any) -> Report | None:
        """What the implementation says of a park that returned *result*; None if it says nothing."""
        report = self.parkable.report(result)
        if report is not None and not isinstance(report, Report):
            raise Broken(expected="Parkable(report=...) gives a Report or None", seen=f"a {type(report).__name__}")
        return report

    def stated_report(self, result: Any) -> Report:
        """The same where there is no check without it."""
        report = self.report(result)
        if report is None:
            raise NotApplicable(
                "park() returns no report with bytes_freed; declare Parkable(report=...) if there is one"
            )
        return report

    # -- expectations -------------------------------------------------------------------------------------------------

    def expect_same(self, *aspects: str, since: Snapshot | None = None, after: str = "park and restore") -> None:
        """The tensors are as they were (at the start, or at *since*) in these aspects; by default values and device."""
        aspects = aspects or ("values", "device")
        found = (since or self.before).differences(self.snapshot(), aspects)
        if found:
            raise Broken(
                expected=f"every tensor has the same {', '.join(aspects)} after {after}",
                seen=f"{len(found)} difference{'s' if len(found) > 1 else ''}: {'; '.join(found[:3])}",
                names=dict.fromkeys(line.split(":")[0] for line in found),
            )

    def expect_output(self, expected: list[torch.Tensor] | None = None, *, after: str = "park and restore") -> None:
        """The forward gives bit for bit what it gave before."""
        wrong = output_difference(self.expected_output if expected is None else expected, self.forward())
        if wrong:
            raise Broken(expected=f"the forward output is bit-equal after {after}", seen=wrong)

    def expect_bytes(self, *, at_most: int, what: str) -> None:
        """Not more than so many device bytes are live."""
        seen = self.device.bytes
        if seen > at_most:
            seen = self.device.settled_bytes()
        if seen > at_most:
            raise Broken(
                expected=f"at most {bytes_text(at_most)} on the device: {what}",
                seen=f"{bytes_text(seen)}, {seen - at_most:,} more",
                names=self.on_device(),
            )

    def expect_value(self, name: str, expected: torch.Tensor, *, written: str) -> None:
        """The weight called *name* has the value that was written to it."""
        now = dict(tensors_of(self.module)).get(name)
        if now is None:
            raise Broken(expected=f"{name} exists", seen="it is gone", names=[name])
        then = TensorRecord.of(expected)
        if tuple(now.shape) != then.shape:
            raise Broken(
                expected=f"the value written by {written}",
                seen=f"shape {list(now.shape)} instead of {list(then.shape)}",
                names=[name],
            )
        if now.untyped_storage().device != self.parkable.device:
            raise Broken(
                expected=f"{name} on {self.parkable.device}", seen=f"{now.untyped_storage().device}", names=[name]
            )
        if bits_of(now) != then.bits:
            was = self.before.records.get(name)
            old = was is not None and bits_of(now) == was.bits
            raise Broken(
                expected=f"the value written by {written}",
                seen="the value from before the write: it was undone" if old else "another value",
                names=[name],
            )

    def on_device(self) -> list[str]:
        """Names of the non-layer weights whose bytes are on the device now."""
        return [f"{name} ({bytes_text(weight.untyped_storage().nbytes())})" for name, weight in self.weights().items()]

    # -- another parkable like this one ------------------------------------------------------------------------------

    def adopt(self, module: nn.Module, inputs: Any = (), streamed: tuple[str, ...] = ()) -> Parkable:
        self.about = ADOPTED.format("of the check's own")
        return adopt(self.parkable, module, inputs, streamed)

    def _first_outputs(self, repeats: bool) -> list[torch.Tensor]:
        parkable = self.parkable
        try:
            positional, named = parkable.inputs()
        except Exception as error:
            raise Untestable(f"Parkable(example_inputs=...) cannot be made arguments: {error_text(error)}") from error
        for tensor in flat_tensors((positional, named)):
            if tensor.device != parkable.device:
                raise Untestable(
                    f"an example input of shape {list(tensor.shape)} is on {tensor.device}, the module's weights on "
                    f"{parkable.device}: move the inputs"
                )
        try:
            with torch.no_grad():
                first = flat_tensors(parkable.call())
                second = first if repeats else flat_tensors(parkable.call())
        except Exception as error:
            raise Untestable(f"the forward of the fresh module raised {error_text(error)}") from error
        wrong = output_difference(first, second)
        if wrong:
            raise Untestable(
                f"the forward is random: two calls on the same inputs differ ({wrong}). Call module.eval(), or seed it "
                "in Parkable(forward=...)"
            )
        return first


#: What a finding says about a module that is not the user's own.
ADOPTED = "not yours, but a small one {}, made parkable by Parkable(adopt=...)"


def adopt(like: Parkable, module: nn.Module, inputs: Any, streamed: tuple[str, ...]) -> Parkable:
    """*module*, made parkable in the way of *like*; `NotApplicable` if that was not declared."""
    if like.adopt is None:
        raise NotApplicable("needs another module than yours: declare Parkable(adopt=...)")
    parkable = like.adopt(module, inputs, streamed)
    if not isinstance(parkable, Parkable):
        raise Untestable(f"it returned {type(parkable).__name__}, not a Parkable")
    if fault := parkable.fault():
        raise Untestable(fault)
    return replace(parkable, fake_device=parkable.fake_device or like.fake_device)


def streamed_parameters(parkable: Parkable) -> Iterator[nn.Parameter]:
    """Parameters that only streamed layers own."""
    prefixes = tuple(f"{name}." for name in parkable.streamed)
    if not prefixes:
        return
    named = list(parkable.module.named_parameters(remove_duplicate=False))
    others = {id(parameter) for name, parameter in named if not name.startswith(prefixes)}
    yield from (parameter for name, parameter in named if name.startswith(prefixes) and id(parameter) not in others)


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an output or in arguments, in order, whatever they are wrapped in."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in flat_tensors(part)]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in flat_tensors(part)]
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        return [tensor for part in vars(value).values() for tensor in flat_tensors(part)]
    return []


def output_difference(expected: list[torch.Tensor], seen: list[torch.Tensor]) -> str:
    """What differs between two outputs; empty if nothing does."""
    if len(expected) != len(seen):
        return f"{len(seen)} tensors instead of {len(expected)}"
    for index, (then, now) in enumerate(zip(expected, seen, strict=True)):
        if (then.shape, then.dtype, then.device) != (now.shape, now.dtype, now.device):
            return (
                f"output {index} is {list(now.shape)} {now.dtype} on {now.device} instead of {list(then.shape)} "
                f"{then.dtype} on {then.device}"
            )
        if bits_of(then) != bits_of(now):
            count = int((then.cpu() != now.cpu()).sum())
            return f"{count or 'some'} of {then.numel()} values of output {index} differ"
    return ""


def collect_garbage() -> None:
    """So that what only reference cycles hold is not counted."""
    gc.collect()


def _require_a_component(parkable: Parkable) -> None:
    if not any(True for _ in parkable.module.parameters()):
        raise Untestable(f"{type(parkable.module).__name__} has no parameters, so there is nothing to park")
    empty = [name for name, tensor in tensors_of(parkable.module) if tensor.is_meta]
    if empty:
        raise Untestable(f"{empty[0]} is on the meta device and has no values: load the module first")
    if parkable.device.type in ("cpu", "meta"):
        raise Untestable(
            f"all weights of {type(parkable.module).__name__} are on {parkable.device}: move the module to the "
            "accelerator (park_device.device in a test) before it is parked"
        )
