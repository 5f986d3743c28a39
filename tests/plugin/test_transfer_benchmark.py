"""`transfer_benchmark`: what is timed, what is written down with the time, and what a person is shown."""

import json
import textwrap

import pytest

from pytest_park.transfers import TransferBenchmark

BENCHMARK = """
    import pytest
    import torch

    ROUNDS = 4  # one of them warms up

    def test_copy(transfer_benchmark, fake_device):
        host = torch.arange(2**20, dtype=torch.uint8)
        copy = transfer_benchmark(lambda: host.to(fake_device.device), bytes="1 MiB", direction="h2d", rounds=3)
        assert torch.equal(copy.cpu(), host)
        assert len(fake_device.transfers) == ROUNDS + 1
"""


def saved(pytester, *arguments, test=BENCHMARK):
    pytester.makepyfile(textwrap.dedent(test))
    result = pytester.runpytest_subprocess("-W", "error", "--benchmark-json=saved.json", *arguments)
    result.assert_outcomes(passed=1)
    return result, json.loads((pytester.path / "saved.json").read_text())


def test_bytes_direction_and_rate_are_saved_with_the_time(pytester):
    result, data = saved(pytester, "--benchmark-only")
    (benchmark,) = data["benchmarks"]
    info = benchmark["extra_info"]
    assert info["bytes"] == 2**20
    assert info["direction"] == "h2d"
    assert info["device"] == "fakegpu:0"
    assert info["GiB/s"] == pytest.approx(2**20 / 2**30 / benchmark["stats"]["median"])
    assert benchmark["stats"]["rounds"] == 3
    result.stdout.fnmatch_lines(["*= park =*", "transfer *", "test_copy *h2d*1.00 MiB* ms *GiB/s"])


def test_the_machine_is_described_by_the_device_and_by_the_project(pytester):
    pytester.makeconftest(
        """
        def pytest_park_machine_info(config, info):
            info["bus"] = f"PCIe 4.0 x16 of {info['name']}"
        """
    )
    _, data = saved(pytester, "--park-fake-memory=2 GiB")
    park = data["machine_info"]["park"]
    assert (park["device"], park["memory"], park["bus"]) == ("fakegpu:0", 2 * 2**30, "PCIe 4.0 x16 of fake device")


def test_benchmarks_of_others_are_saved_as_if_we_were_not_there(pytester):
    _, data = saved(pytester, test="def test_it(benchmark): benchmark(int)")
    assert "park" not in data["machine_info"]


def test_with_benchmarks_disabled_the_function_runs_once_and_no_rate_is_invented(pytester):
    pytester.makepyfile(BENCHMARK.replace("ROUNDS = 4", "ROUNDS = 1"))
    result = pytester.runpytest_subprocess("--benchmark-disable")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*GiB/s*")


def test_the_clock_stops_when_the_device_is_done(transfer_benchmark, fake_device, monkeypatch):
    import torch

    happened = []
    monkeypatch.setattr(torch.get_device_module("fakegpu"), "synchronize", lambda device=None: happened.append("idle"))
    transfer_benchmark(
        lambda: happened.append("work"),
        setup=lambda: happened.append("setup"),
        bytes=1,
        direction="d2h",
        rounds=1,
        warmup_rounds=0,
    )
    assert happened == ["setup", "idle", "work", "idle"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"bytes": 1, "direction": "up"}, "'up' is not the direction of a transfer: use one of h2d, d2h, d2d"),
        ({"bytes": "12 gigs", "direction": "h2d"}, "'12 gigs' is not a size"),
    ],
    ids=["direction", "bytes"],
)
def test_a_wrong_argument_is_refused_before_anything_runs(fake_device, arguments, says):
    transfer_benchmark = TransferBenchmark(benchmark=None, device=fake_device)
    with pytest.raises(ValueError, match=says):
        transfer_benchmark(pytest.fail, **arguments)


@pytest.mark.parametrize("only", ["--benchmark-only", "--benchmark-skip"])
def test_a_test_that_uses_it_counts_as_a_benchmark(pytester, only):
    pytester.makepyfile(
        """
        def test_transfer(transfer_benchmark):
            transfer_benchmark(int, bytes=1, direction="h2d")

        def test_other(fake_device): pass
        """
    )
    result = pytester.runpytest_subprocess(only, "-v")
    result.assert_outcomes(passed=1, skipped=1)
    ran = "test_transfer" if only == "--benchmark-only" else "test_other"
    result.stdout.fnmatch_lines([f"*::{ran} PASSED*"])
