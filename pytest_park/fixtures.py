"""The fixtures. Each is a few lines over a class that works without pytest; what imports torch is imported inside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_park import leaks, reporting
from pytest_park.marks import fake_device_wish
from pytest_park.options import park_options
from pytest_park.selection import find_real_gpus

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from pytest_park.devices import ParkDevice
    from pytest_park.fakegpu import FakeDevice
    from pytest_park.pressure import Headroom
    from pytest_park.transfers import TransferBenchmark


@pytest.fixture
def fake_device(request: pytest.FixtureRequest) -> Iterator[FakeDevice]:
    """A fake accelerator, for the length of the test: ``fake_device.device`` is where to put modules and tensors.

    Its memory is that of ``@pytest.mark.fake_device(memory="8 GiB", count=1)``, else of ``--park-fake-memory``. Memory
    that outlives a test that passed is an error of the test, see ``--park-fake-leaks``.
    """
    from pytest_park.fakegpu import activate

    wish = fake_device_wish(request.node)
    with activate(wish.memory, count=wish.count, expandable_segments=wish.expandable_segments) as device:
        if wish.leaks == "error":
            leaks.watch(request.node, device)
        reporting.note_device(request.config, device, name="fake device")
        yield device


@pytest.fixture
def park_device(request: pytest.FixtureRequest) -> ParkDevice:
    """The device to test on: the fake one or, under ``--real-gpu``, the real accelerator, with the same interface."""
    if not park_options(request.config).real_gpu:
        fake: ParkDevice = request.getfixturevalue("fake_device")
        return fake
    from pytest_park.devices import RealDevice

    gpus = find_real_gpus(request.config)
    device = RealDevice(gpus.device)
    reporting.note_device(request.config, device, name=gpus.name)
    return device


@pytest.fixture
def headroom(park_device: ParkDevice) -> Iterator[Headroom]:
    """Call it with a size, ``headroom("64 MiB")``, to make the headroom of ``park_device`` that many bytes.

    ``headroom.bytes`` is what there is. What was taken is given back at the end of the test, also of a failed one.
    """
    from pytest_park.pressure import Headroom

    headroom = Headroom(park_device)
    yield headroom
    headroom.undo()


@pytest.fixture
def transfer_benchmark(
    request: pytest.FixtureRequest, benchmark: BenchmarkFixture, park_device: ParkDevice
) -> TransferBenchmark:
    """Call it as ``transfer_benchmark(function, bytes=…, direction="h2d")`` to time a transfer on ``park_device``."""
    from pytest_park.transfers import TransferBenchmark

    return TransferBenchmark(benchmark, park_device, record=partial(reporting.note_rate, request.config))
