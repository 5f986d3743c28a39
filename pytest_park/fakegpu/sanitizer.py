"""Does anything order this access after that one? Reads, writes and frees on several streams, checked as they happen.

What orders what is torch's own logic, the vector clocks of ``torch.cuda._sanitizer`` (there is no CUDA in them), and so
is the report. Nothing can race on one stream, so nothing is noted before a second one is made; from then on every
access is, with its stack.

Added here: torch's sanitizer knows a tensor by its first byte and forgets it when it is freed. This one knows bytes, so
that a slice and the whole conflict and two slices do not; and it holds what streams did with freed memory against the
next owner, which is how a missing ``record_stream`` shows. And it is cheap: as long as a single stream has touched some
memory, an access is noted and nothing is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch.cuda._sanitizer import Access as Reported
from torch.cuda._sanitizer import AccessType, StreamSynchronizations, UnsynchronizedAccessError

from . import active
from .stacks import Stack, capture

if TYPE_CHECKING:
    from .blocks import Block
    from .device import FakeDevice
    from .ledger import Entry


class RaceError(RuntimeError):
    """Two accesses to the same memory that no event, wait or synchronization orders."""


#: One kernel: its number among all, the operator, and the stack where it was called. A plain tuple, because one is made
#: for every kernel; so are those below.
Launch = tuple[int, str, Any]
#: What a stream did with which bytes: the stream, the first byte and the one after the last, whether it wrote.
Access = tuple[int, int, int, bool]


class History:
    """Who touched the bytes of a storage: of each kind of access, the last one."""

    __slots__ = ("accesses", "last", "owner", "stream")
    last: Launch

    def __init__(self, owner: int, stream: int | None) -> None:
        #: The stream that the memory was allocated on.
        self.owner = owner
        #: The stream of all accesses, None once there are several.
        self.stream = stream
        self.accesses: dict[Access, Launch] = {}


class Sanitizer:
    """Watches all fake devices that are active together."""

    def __init__(self) -> None:
        self.watching = False
        self._paused = False
        self.found: list[RaceError] = []
        self._lock = threading.RLock()
        self._clocks = StreamSynchronizations()
        self._number = 0
        self._latest: dict[int, int] = {}  # by stream: the number of its last kernel, which the clocks are told late

    # -- streams and events -------------------------------------------------------------------------------------------

    def stream_made(self, stream: int) -> None:
        """A stream besides the default ones: from now on there is something to check."""
        with self._lock:
            if not self.watching:
                self.watching = True
                for card in active.cards:
                    self._begin(card)
                active.sanitizer = None if self._paused else self
            self._clocks.create_stream(stream)

    def _begin(self, card: FakeDevice) -> None:
        """What the default stream was given before anybody could race with it, and the host has not waited for."""
        default = stream_key(card.index, 0)
        self._clocks.create_stream(default)
        self._number = self._latest[default] = number = self._number + 1
        launch = number, "work given before the first stream was made", None
        for entry in list(card.entries.values()):
            if entry.born > card.synchronized_at:
                entry.history = history = History(stream_key(card.index, entry.block.stream), default)
                history.accesses[default, 0, entry.block.size, True] = history.last = launch

    def recorded(self, event: int, stream: int) -> None:
        if self.watching:
            with self._lock:
                self._told().record_state(event, stream)

    def waited(self, event: int, stream: int) -> None:
        if self.watching:
            with self._lock:
                self._told().stream_wait_for_event(stream, event)

    def ordered(self, first: int, then: int) -> None:
        """What is given to stream *then* from now on runs after what stream *first* has."""
        if self.watching:
            with self._lock:
                self._told().record_state(_PASSING, first)
                self._clocks.stream_wait_for_event(then, _PASSING)

    def host_waited_for_stream(self, stream: int) -> None:
        if self.watching:
            with self._lock:
                self._host_reached(self._told().current_sync_states.get(stream, {}))

    def host_waited_for_event(self, event: int) -> None:
        if self.watching:
            with self._lock:
                self._host_reached(self._told().recorded_sync_states.get(event, {}))

    def host_waited_for_all(self) -> None:
        if self.watching:
            with self._lock:
                self._told().sync_all_streams()

    def _host_reached(self, state: dict[int, int]) -> None:
        """What the host has waited for is before all that is given to any stream later: `_races` asks for that too, so
        that no stream has to be told, as torch's own function does for each."""
        host = self._clocks.host_sync_state
        for stream, number in state.items():
            host[stream] = max(host.get(stream, -1), number)

    def has_reached_host(self, stream: int, number: int) -> bool:
        """Whether the host has waited for the work *number* of *stream*, directly or by way of others."""
        return not self.watching or self._clocks.host_sync_state.get(stream, -1) >= number

    def _told(self) -> StreamSynchronizations:
        """torch's clocks, after they were told what ran since they were last asked."""
        for stream, number in self._latest.items():
            self._clocks.update_seq_num(stream, number)
        self._latest.clear()
        return self._clocks

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No access is noted inside; what waits for what still is."""
        before, self._paused, active.sanitizer = self._paused, True, None
        try:
            yield
        finally:
            self._paused = before
            active.sanitizer = self if self.watching and not before else None

    # -- accesses -----------------------------------------------------------------------------------------------------

    def launched(
        self, footprint: Footprint, index: int, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> int:
        """An operator ran on the current stream of device *index*; its number. Raises `RaceError`, which shows both
        accesses."""
        with self._lock:
            stream = active.stream(index) or -index  # stream_key, written out
            self._number = self._latest[stream] = number = self._number + 1
            launch = number, footprint.operator, capture()
            races: list[UnsynchronizedAccessError] = []
            for position, name, writes in footprint.tensors:
                value = args[position] if position < len(args) else kwargs.get(name)
                if value is not None:
                    self._touched(value, writes, stream, launch, races)
            self._touched(result, True, stream, launch, races)
            if races:
                raise self._report(races)
            return number

    def _touched(
        self, value: Any, writes: bool, stream: int, launch: Launch, races: list[UnsynchronizedAccessError]
    ) -> None:
        if not isinstance(value, Tensor):
            if isinstance(value, list | tuple):
                for item in value:
                    self._touched(item, writes, stream, launch, races)
            return
        index, nbytes = value.get_device(), value.nbytes
        if index < 0 or not nbytes:
            return
        entry = active.cards[index].entries.get(value.untyped_storage()._cdata)
        if entry is None:
            return
        start: Any = value.storage_offset() * value.element_size()
        access = stream, start, start + (nbytes if value.is_contiguous() else _extent(value)), writes
        history = entry.history
        if history is None:
            history = entry.history = self._inherited(entry, stream)
        # noted first and compared afterwards, so that of two threads at least one sees the other
        history.accesses[access] = history.last = launch
        if history.stream != stream:
            history.stream = None
            races += self._races(entry, history, access, launch)

    def _races(
        self, entry: Entry, history: History, access: Access, launch: Launch
    ) -> Iterator[UnsynchronizedAccessError]:
        """One for each access by another stream to the same bytes that nothing orders before *access*."""
        stream, start, end, writes = access
        ordered = self._told().is_ordered_after
        for earlier, its_launch in history.accesses.items():
            other, its_start, its_end, wrote = earlier
            meets = other != stream and (writes or wrote) and its_start < end and start < its_end
            number = its_launch[0]
            if meets and not ordered(stream, number, other) and not self.has_reached_host(other, number):
                address = entry.block.address
                place: Any = f"fakegpu:{entry.card.index} {address + start:#x} to {address + end:#x}"
                yield UnsynchronizedAccessError(place, None, _reported(access, launch), _reported(earlier, its_launch))

    def refuse(self, misuse: str) -> NoReturn:
        """Raise for what is wrong in itself, whatever else happens."""
        race = RaceError(misuse)
        self.found.append(race)
        raise race

    def _report(self, races: list[UnsynchronizedAccessError]) -> RaceError:
        text = "\n\n".join(str(race) for race in races).replace("CSAN detected", "the sanitizer detected")
        race = RaceError(
            f"{text}\nWhat is missing is a wait_stream, wait_event, record_stream or synchronize between the two."
        )
        self.found.append(race)
        return race

    def let_go(self) -> None:
        """The end: what was found stays, but without the frames, whose locals hold tensors of the devices."""
        for race in self.found:
            race.__traceback__ = None

    # -- memory -------------------------------------------------------------------------------------------------------

    def _inherited(self, entry: Entry, stream: int) -> History:
        """The history of memory that *stream* is the first to touch: what was done with it before it was freed.

        The stream that owns a block gets it back without asking, so what that stream did matters only if another one
        comes first.
        """
        block = entry.block
        segment, owner = block.segment, stream_key(entry.card.index, block.stream)
        history = History(owner, stream)
        if stream != owner or segment.left_by_others:
            left = segment.left_by_others if stream == owner else segment.left_by_others | segment.left_by_owner
            start, end = block.address, block.address + block.size
            for (other, its_start, its_end, wrote), launch in left.copy().items():
                if its_start < end and start < its_end:
                    history.accesses[other, its_start - start, its_end - start, wrote] = launch
                    history.stream = None
        return history

    def freed(self, block: Block, history: History) -> None:
        """Remember what streams did with the memory, for `_inherited`.

        With ``record_stream`` the host waits before the memory is used again; that orders what the stream did.

        Called by a garbage collection in the middle of anything, so it takes no lock and stores in one step; who looks
        at what is stored looks at a copy.
        """
        start, end, segment, owner = block.address, block.address + block.size, block.segment, history.owner
        if history.stream == owner:
            segment.left_by_owner[owner, start, end, False] = history.last
            return
        last: dict[int, Launch] = {}
        for (stream, *_), launch in history.accesses.copy().items():
            last[stream] = max(last.get(stream, launch), launch, key=_number)
        for stream, launch in last.items():
            left = segment.left_by_owner if stream == owner else segment.left_by_others
            left[stream, start, end, False] = launch
            if len(left) >= _MANY and not len(left) & (len(left) - 1):  # at every power of two
                for access, before in left.copy().items():
                    if self.has_reached_host(access[0], before[0]):
                        left.pop(access, None)


class Footprint:
    """Which arguments of an operator are tensors, or lists of them, and which of these are written."""

    __slots__ = ("operator", "tensors")

    def __init__(self, op: Any) -> None:
        self.operator = str(op)
        self.tensors = [
            (position, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
            for position, argument in enumerate(op._schema.arguments)
            if "Tensor" in str(argument.type)
        ]


def stream_key(index: int, stream: int) -> int:
    """A number for a stream that no stream of another device has; torch's sanitizer knows the default stream as 0."""
    return stream or -index


def _reported(access: Access, launch: Launch) -> Reported:
    number, operator, captured = launch
    stack: Any = Stack(captured)
    return Reported(AccessType.WRITE if access[-1] else AccessType.READ, number, access[0], operator, [], False, stack)


def _number(launch: Launch) -> int:
    return launch[0]


_MANY = 64
_PASSING = 0  # no event of anybody has this number


def _extent(tensor: Tensor) -> int:
    """Bytes from the first to the last element, both included."""
    reach = int(sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))
    return (reach + 1) * tensor.element_size()
