"""What a run says about us: a header line, the tests that wait for a GPU, the rates of transfers, the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_park.options import ParkOptions
from pytest_park.selection import NEEDS_REAL_GPU, RealGpus
from pytest_park.sizes import format_bytes

if TYPE_CHECKING:
    from pytest_park.devices import ParkDevice
    from pytest_park.transfers import TransferRate

_RATES: Final = pytest.StashKey[list["TransferRate"]]()
_DEVICE_INFO: Final = pytest.StashKey[dict[str, Any]]()


def header(options: ParkOptions, gpus: RealGpus | None) -> str | None:
    """The header line; None where none of our settings was given, so that other projects' output stays as it was."""
    if gpus is not None:
        others = f" (1 of {gpus.count})" if gpus.count > 1 else ""
        return f"park: real GPU {gpus.device}{others}, {gpus.name}, {format_bytes(gpus.memory)}"
    if not options.stated:
        return None
    devices = "1 fake device" if options.fake_count == 1 else f"{options.fake_count} fake devices"
    return f"park: {devices}, {format_bytes(options.fake_memory)}"


def note_device(config: pytest.Config, device: ParkDevice, name: str) -> None:
    """Remember the device that tests of this run used, for :func:`machine_info`."""
    if _DEVICE_INFO not in config.stash:
        import torch

        config.stash[_DEVICE_INFO] = {
            "device": str(device.device),
            "name": name,
            "memory": device.memory,
            "torch": torch.__version__,
        }


def machine_info(config: pytest.Config) -> dict[str, Any]:
    """What the plugin itself knows of the device: empty in a run that did not use one."""
    return config.stash.get(_DEVICE_INFO, None) or {}


def note_rate(config: pytest.Config, rate: TransferRate) -> None:
    """Remember a measured transfer for the table at the end of the run."""
    config.stash.setdefault(_RATES, []).append(rate)


def summary(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write what there is to say at the end of the run."""
    waiting = sum(_waits_for_gpu(report) for report in terminal.stats.get("skipped", []))
    rates = config.stash.get(_RATES, [])
    if not waiting and not rates:
        return
    terminal.section("park")
    if rates:
        width = max(len(rate.name) for rate in rates)
        terminal.line(f"{'transfer':{width}}  way        bytes     median       rate")
        for rate in rates:
            terminal.line(
                f"{rate.name:{width}}  {rate.direction}  {format_bytes(rate.bytes):>11}  {rate.seconds * 1e3:6.3f} ms  "
                f"{rate.gib_per_second:5.2f} GiB/s"
            )
    if waiting:
        tests = "1 test was" if waiting == 1 else f"{waiting} tests were"
        terminal.line(f"{tests} skipped because a real GPU is needed: run with --real-gpu where there is one.")


def _waits_for_gpu(report: Any) -> bool:
    # The reason travels with the report from xdist's workers; a stash or a mark would not.
    return isinstance(report.longrepr, tuple) and str(report.longrepr[2]).endswith(NEEDS_REAL_GPU)
