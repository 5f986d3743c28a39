"""Does anything order this access after that one? Reads, writes and frees on several streams, checked as they happen.

The logic is torch's own (``torch.cuda._sanitizer.EventHandler`` has no CUDA in it): vector clocks of streams, and for
every block of memory its last write and the reads since. Nothing can race on one stream, so nothing is recorded
before a second one is made; from then on every kernel is, with its stack.

Added here: torch's sanitizer knows a tensor by its first byte and forgets it when it is freed. This one knows bytes, so
that a slice and the whole conflict and two slices do not; and it holds what other streams did with freed memory
against the next owner, which is how a missing ``record_stream`` shows.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import Access, AccessType, EventHandler, SynchronizationError, UnsynchronizedAccessError

from . import active
from .blocks import Block

if TYPE_CHECKING:
    from .device import FakeDevice


class Range(NamedTuple):
    """The bytes from *start* up to *end* in the block at *block* of device *card*; addresses as the allocator gives."""

    card: int
    block: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"fakegpu:{self.card} {self.start:#x} to {self.end:#x}"

    def meets(self, other: Range) -> bool:
        return self.card == other.card and self.start < other.end and other.start < self.end


class RaceError(RuntimeError):
    """Two accesses to the same memory that no event, wait or synchronization orders."""


class Stack(list[tuple[CodeType, int]]):
    """Where an access was made: code and line, because that is cheap to note and enough to print."""

    @classmethod
    def extract(cls, frames: Iterable[tuple[FrameType, int]], lookup_lines: bool = True) -> Stack:
        return cls((frame.f_code, line) for frame, line in frames)

    def format(self) -> list[str]:
        places = [(code.co_filename, line, code.co_name, None) for code, line in self]
        return traceback.StackSummary.from_list(places).format()


class Handler(EventHandler):
    """torch's, with cheap stacks: it notes one for every kernel, and torch's take longer than most kernels."""

    _handle_kernel_launch = FunctionType(
        EventHandler._handle_kernel_launch.__code__,
        vars(_sanitizer) | {"traceback": SimpleNamespace(StackSummary=Stack, walk_stack=traceback.walk_stack)},
    )


class Sanitizer:
    """Watches all fake devices that are active together."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.found: list[RaceError] = []
        self._lock = threading.RLock()
        self._known: dict[tuple[int, int], list[Range]] = {}  # by device and block address: the ranges accessed so far
        self._freed: dict[tuple[int, int], list[tuple[Range, list[Access]]]] = {}  # by device and segment address

    # -- streams and events -------------------------------------------------------------------------------------------

    def stream_made(self, stream: int) -> None:
        """A stream besides the default ones: from now on there is something to check."""
        with self._lock:
            if self.handler is None:
                self.handler = Handler()
                for card in active.cards:
                    self._begin(card)
                active.uncommon = True
            self.handler._handle_stream_creation(stream)

    def _begin(self, card: FakeDevice) -> None:
        """What the default stream was given before anybody could race with it, and the host has not waited for."""
        assert self.handler is not None
        default = stream_key(card.index, 0)
        self.handler._handle_stream_creation(default)
        young = [entry.block for entry in list(card.entries.values()) if entry.born > card.synchronized_at]
        if young:
            ranges = {self._remember(whole(card.index, block)) for block in young}
            self._launch(default, set(), ranges, "work given before the first stream was made")

    def recorded(self, event: int, stream: int) -> None:
        if self.handler is not None:
            with self._lock:
                self.handler.syncs.recorded_sync_states.setdefault(event, {})
                self.handler._handle_event_record(event, stream)

    def waited(self, event: int, stream: int) -> None:
        if self.handler is not None:
            with self._lock:
                self.handler.syncs.recorded_sync_states.setdefault(event, {})
                self.handler._handle_event_wait(event, stream)

    def host_waited_for_stream(self, stream: int) -> None:
        if self.handler is not None:
            with self._lock:
                self.handler._handle_stream_synchronization(stream)

    def host_waited_for_event(self, event: int) -> None:
        if self.handler is not None:
            with self._lock:
                self.handler.syncs.recorded_sync_states.setdefault(event, {})
                self.handler._handle_event_synchronization(event)

    def host_waited_for_all(self) -> None:
        if self.handler is not None:
            with self._lock:
                self.handler._handle_device_synchronization()

    def has_reached_host(self, stream: int, seq: int) -> bool:
        """Whether the host has waited for the work *seq* of *stream*, directly or by way of others."""
        return self.handler is None or self.handler.syncs.host_sync_state.get(stream, -1) >= seq

    # -- accesses -----------------------------------------------------------------------------------------------------

    def launched(self, operator: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> int:
        """*operator* ran on the current stream; its number there. Raises `RaceError`, which shows both accesses."""
        assert self.handler is not None
        with self._lock:
            read, written = self._ranges(reads), self._ranges(writes)
            if not read and not written:
                return self.handler.seq_num
            index = next(iter(read | written)).card
            return self._launch(stream_key(index, active.stream(index)), read - written, written, operator)

    def _launch(self, stream: int, read: set[Range], written: set[Range], operator: str) -> int:
        assert self.handler is not None
        aliases: dict[Any, list[str]] = {where: [] for where in read | written}
        handle: Any = self.handler._handle_kernel_launch  # its annotations say int for what it uses as a key only
        errors = handle(stream, read, written, set(), operator, aliases)
        for where in read:
            info = self._info(where)
            self._hold_against_neighbours(where, info.reads[-1], errors)
            info.reads = list(
                {access.stream: access for access in info.reads}.values()
            )  # the last stands for all before
        for where in written:
            self._hold_against_neighbours(where, self._info(where).write, errors)
        if errors:
            raise self._report(errors)
        return self.handler.seq_num

    def _hold_against_neighbours(self, where: Range, access: Access, errors: list[SynchronizationError]) -> None:
        """torch's handler has checked the range itself; the same for every other that shares bytes with it."""
        assert self.handler is not None
        for other in self._known[where.card, where.block]:
            if other != where and other.meets(where):
                info = self._info(other)
                before = [*info.reads, info.write] if access.type is AccessType.WRITE else [info.write]
                ordered = self.handler.syncs.is_ordered_after
                races = [a for a in before if a is not None and not ordered(access.stream, a.seq_num, a.stream)]
                errors += [UnsynchronizedAccessError(0, None, access, previous) for previous in races]

    def _ranges(self, tensors: Iterable[torch.Tensor]) -> set[Range]:
        """The bytes of device tensors; host tensors have none."""
        found: set[Range] = set()
        for tensor in tensors:
            index = tensor.get_device()
            entry = active.card(index).entries.get(tensor.untyped_storage()._cdata) if index >= 0 else None
            if entry is not None and tensor.numel():
                block = entry.block.address
                start = block + int(tensor.storage_offset()) * tensor.element_size()
                found.add(self._remember(Range(index, block, start, start + _extent(tensor))))
        return found

    def _remember(self, where: Range) -> Range:
        known = self._known.setdefault((where.card, where.block), [])
        if where not in known:
            known.append(where)
        return where

    def _info(self, where: Range) -> Any:
        assert self.handler is not None
        tensors: Any = self.handler.tensors_accessed
        if where not in tensors.accesses:
            tensors.create_tensor(where, None)
        return tensors.accesses[where]

    def refuse(self, misuse: str) -> NoReturn:
        """Raise for what is wrong in itself, whatever else happens."""
        race = RaceError(misuse)
        self.found.append(race)
        raise race

    def _report(self, errors: list[SynchronizationError]) -> RaceError:
        text = "\n\n".join(str(error) for error in errors).replace("CSAN detected", "the sanitizer detected")
        race = RaceError(
            f"{text}\nWhat is missing is a wait_stream, wait_event, record_stream or synchronize between the two."
        )
        self.found.append(race)
        return race

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocated(self, card: FakeDevice, block: Block) -> None:
        """What other streams still do with the memory of *block* is held against its new owner."""
        if self.handler is None:
            return
        with self._lock:
            where = whole(card.index, block)
            freed = self._freed.get((card.index, block.segment.address), ())
            inherited = [access for range, accesses in freed if range.meets(where) for access in accesses]
            if inherited:
                self._info(self._remember(where)).reads.extend(inherited)

    def freed(self, card: FakeDevice, block: Block) -> None:
        """Remember what streams did with *block*, but for those that ``record_stream`` makes it wait for."""
        if self.handler is None:
            return
        with self._lock:
            waits_for = {stream_key(card.index, stream) for stream in block.uses or ()}
            accesses = []
            for range in self._known.pop((card.index, block.address), ()):
                info = self._info(range)
                accesses += [*info.reads, *([info.write] if info.write else [])]
                del self.handler.tensors_accessed.accesses[range]  # type: ignore[arg-type]
            others = {access.stream: access for access in accesses if access.stream not in waits_for}
            here = whole(card.index, block)
            bucket = (card.index, block.segment.address)
            kept = [item for item in self._freed.get(bucket, ()) if not item[0].meets(here)]
            self._freed[bucket] = [*kept, (here, list(others.values()))] if others else kept


def stream_key(index: int, stream: int) -> int:
    """A number for a stream that no stream of another device has; torch's sanitizer knows the default stream as 0."""
    return stream or -index


def whole(index: int, block: Block) -> Range:
    return Range(index, block.address, block.address, block.address + block.size)


def accessed(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[list[Any], list[Any]]:
    """(tensors read, tensors written) by an operator with *schema*: arguments marked as written and fresh results."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    key = (schema.name, schema.overload_name)  # a schema with a list as a default cannot be hashed
    if key not in _arguments:
        _arguments[key] = _written(schema)
    written, names = _arguments[key]
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if type(value) not in _PLAIN:
            (writes if name in written else reads).extend(_tensors(value))
    writes.extend(_tensors(result))
    return reads, writes


_PLAIN = frozenset((int, float, bool, type(None), str))


_arguments: dict[tuple[str, str], tuple[frozenset[str], tuple[str, ...]]] = {}


def _written(schema: Any) -> tuple[frozenset[str], tuple[str, ...]]:
    """(arguments that are written, all positional arguments) by name."""
    arguments = schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return frozenset(written), tuple(argument.name for argument in arguments)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element, both included."""
    if tensor.is_contiguous():
        return tensor.nbytes
    reach = int(sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))
    return (reach + 1) * tensor.element_size()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
