"""Timing of transfers between host and device, on top of pytest-benchmark's ``benchmark`` fixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar, get_args

from pytest_park.devices import ParkDevice, synchronize
from pytest_park.sizes import GiB, parse_size

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

Direction = Literal["h2d", "d2h", "d2d"]
R = TypeVar("R")

_DIRECTIONS: Final = get_args(Direction)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRate:
    """One measured transfer: ``bytes`` moved in ``seconds`` (the median of the rounds)."""

    name: str
    direction: Direction
    bytes: int
    seconds: float

    @property
    def gib_per_second(self) -> float:
        return self.bytes / GiB / self.seconds


class TransferBenchmark:
    """Call it as ``transfer_benchmark(function, bytes=…, direction="h2d")`` to time a function that moves bytes.

    The clock starts when the device is idle and stops when it has done what the function gave it to do. Beside
    pytest-benchmark's own numbers, ``extra_info`` of the benchmark has ``bytes``, ``direction``, ``device`` and, where
    something was measured (not under ``--benchmark-disable``), ``GiB/s``.
    """

    def __init__(
        self,
        benchmark: BenchmarkFixture,
        device: ParkDevice,
        record: Callable[[TransferRate], None] = lambda rate: None,
    ) -> None:
        self._benchmark = benchmark
        self._device = device
        self._record = record

    def __call__(
        self,
        function: Callable[[], R],
        *,
        bytes: int | str,
        direction: Direction,
        setup: Callable[[], object] | None = None,
        teardown: Callable[[], object] | None = None,
        rounds: int = 10,
        warmup_rounds: int = 1,
    ) -> R:
        """Time ``function``, which moves ``bytes`` in one call, and return what its last call returned.

        ``setup`` and ``teardown`` run around each round, outside of the time. Raises ``ValueError`` for a direction
        other than h2d (host to device), d2h and d2d, and for a size that is none.
        """
        if direction not in _DIRECTIONS:
            raise ValueError(f"{direction!r} is not the direction of a transfer: use one of {', '.join(_DIRECTIONS)}.")
        moved = parse_size(bytes)
        device = self._device.device

        def settle() -> None:
            if setup is not None:
                setup()
            synchronize(device)

        def timed() -> R:
            result = function()
            synchronize(device)
            return result

        info = self._benchmark.extra_info
        info.update({"bytes": moved, "direction": direction, "device": str(device)})
        result: R = self._benchmark.pedantic(  # type: ignore[no-untyped-call]
            timed,
            setup=settle,
            teardown=teardown,
            rounds=rounds,
            warmup_rounds=warmup_rounds,
        )
        if self._benchmark.stats is not None:
            rate = TransferRate(
                name=self._benchmark.name,
                direction=direction,
                bytes=moved,
                seconds=float(self._benchmark.stats.stats.median),
            )
            info["GiB/s"] = rate.gib_per_second
            self._record(rate)
        return result
