"""`--real-gpu`: who is skipped, who runs, and a promised GPU that is missing.

Without a GPU the real path is tested with a stand-in: a conftest whose ``pytest_park_device`` names a device of the
fake back end, which the plugin then treats as it would treat ``cuda:0``.
"""

import pytest

from pytest_park.selection import RealGpus, WantedGpu
from pytest_park.sizes import GiB
from pytest_park.workers import environment_of_worker

TWO_TESTS = """
    import pytest

    @pytest.mark.real_gpu
    def test_real(): pass

    @pytest.mark.real_gpu(count=2)
    def test_real_pair(): pass

    def test_plain(): pass
"""

STAND_IN = """
    from pytest_park.fakegpu import activate

    # At import, because xdist asks for the number of GPUs before anything is configured.
    cards = activate(memory="256 MiB", count=1)
    cards.__enter__()

    def pytest_unconfigure():
        cards.__exit__(None, None, None)

    def pytest_park_device(config):
        return "fakegpu"
"""


def test_without_the_option_real_tests_are_skipped_and_the_summary_counts_them(pytester):
    pytester.makepyfile(TWO_TESTS)
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["*= park =*", "2 tests were skipped because a real GPU is needed:*--real-gpu*"])


def test_a_skip_of_another_reason_is_not_counted(pytester):
    pytester.makepyfile("import pytest\n\n@pytest.mark.skip(reason='rain')\ndef test_it(): pass\n")
    pytester.runpytest().stdout.no_fnmatch_line("*real GPU is needed*")


def test_the_summary_counts_the_tests_of_all_workers(pytester):
    pytester.makepyfile(TWO_TESTS)
    result = pytester.runpytest_subprocess("-n", "2", "--benchmark-disable")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["2 tests were skipped because a real GPU is needed:*"])


@pytest.mark.parametrize("workers", [[], ["-n", "2"], ["-n", "auto"]], ids=["alone", "two-workers", "auto-workers"])
def test_a_promised_gpu_that_is_missing_ends_the_run(pytester, monkeypatch, workers):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that this holds on a machine with a GPU as well
    pytester.makepyfile(TWO_TESTS)
    result = pytester.runpytest_subprocess("--real-gpu", *workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR == 4
    result.stderr.fnmatch_lines(["ERROR: --real-gpu: torch * finds no GPU here.*"])
    result.stdout.no_fnmatch_line("*passed*")


def test_a_project_can_name_its_device_and_real_tests_run_on_it(pytester):
    pytester.makeconftest(STAND_IN)
    pytester.makepyfile(
        """
        import pytest
        import torch

        @pytest.mark.real_gpu
        def test_real(park_device):
            assert park_device.device == torch.device("fakegpu", 0)
            assert type(park_device).__name__ == "RealDevice"
            assert park_device.memory == 256 * 1024**2
            before = park_device.allocated
            kept = torch.zeros(1024, dtype=torch.uint8, device=park_device.device)
            assert park_device.allocated == before + 1024
            assert park_device.peak_allocated == before + 1024
            assert park_device.memory - park_device.free == park_device.reserved == 2 * 1024**2
            del kept
            park_device.reset_peak()
            assert park_device.peak_allocated == before
            park_device.empty_cache()
            assert park_device.free == park_device.memory

        @pytest.mark.real_gpu(count=2)
        def test_pair(): pass

        @pytest.mark.real_gpu(memory="3 GiB")
        def test_big(): pass

        def test_unmarked(park_device):
            assert type(park_device).__name__ == "RealDevice"
        """
    )
    result = pytester.runpytest_subprocess("--real-gpu", "-rs")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "park: real GPU fakegpu:0, *, 256.00 MiB",
            "*needs 2 GPUs, 1 can be seen*",
            "*needs a GPU with 3.00 GiB, here it has 256.00 MiB*",
        ]
    )


def test_headroom_of_a_real_device_is_made_with_ballast_and_given_back(pytester):
    pytester.makeconftest(STAND_IN)
    pytester.makepyfile(
        """
        import pytest
        import torch

        def test_it(park_device, headroom):
            assert headroom("64 MiB") == headroom.bytes == 64 * 1024**2
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(65 * 1024**2, dtype=torch.uint8, device=park_device.device)
            kept = torch.empty(50 * 1024**2, dtype=torch.uint8, device=park_device.device)
            assert headroom.bytes == 14 * 1024**2
            del kept
            assert headroom(1000) - 1000 in range(512)
            raise RuntimeError("a test that fails")

        def test_afterwards(park_device, headroom):
            assert park_device.allocated == 0
            assert headroom.bytes == park_device.memory == park_device.free
        """
    )
    result = pytester.runpytest_subprocess("--real-gpu")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: a test that fails*"])


def test_more_workers_than_gpus_are_refused(pytester):
    pytester.makeconftest(STAND_IN)
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess("--real-gpu", "-n", "2", "--benchmark-disable")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*there is 1 GPU: use -n 1 or -n auto, not -n 2*"])


def gpus(vendor="nvidia", count=1, memory=12 * GiB):
    return RealGpus(device=None, vendor=vendor, name="a card", count=count, memory=memory)


@pytest.mark.parametrize(
    ("wanted", "there", "reason"),
    [
        (WantedGpu(), gpus(), None),
        (WantedGpu(vendor="nvidia", count=2, memory=12 * GiB), gpus(count=2), None),
        (WantedGpu(vendor="amd"), gpus(), "needs a GPU of vendor amd, here it is nvidia"),
        (WantedGpu(vendor="amd"), gpus(vendor=None), "needs a GPU of vendor amd, here it is an unknown one"),
        (WantedGpu(count=3), gpus(count=2), "needs 3 GPUs, 2 can be seen"),
        (WantedGpu(memory=12 * GiB + 1), gpus(), "needs a GPU with 12.00 GiB, here it has 12.00 GiB"),
    ],
    ids=["anything", "all-there", "other-vendor", "unknown-vendor", "too-few", "too-small"],
)
def test_a_test_runs_where_everything_it_wants_is_there(wanted, there, reason):
    assert wanted.missing_in(there) == reason


@pytest.mark.parametrize(
    ("vendor", "environ", "expected"),
    [
        ("nvidia", {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "5, 7,2"}, {"CUDA_VISIBLE_DEVICES": "7"}),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "GPU-aa,MIG-bb"}, {"CUDA_VISIBLE_DEVICES": "MIG-bb"}),
        ("amd", {"CUDA_VISIBLE_DEVICES": "5,7"}, {"HIP_VISIBLE_DEVICES": "1"}),
        ("intel", {"ZE_AFFINITY_MASK": "3,4"}, {"ZE_AFFINITY_MASK": "4"}),
        ("apple", {}, {}),
        (None, {}, {}),
    ],
    ids=["all-visible", "some-visible", "by-name", "rocm", "xpu", "mps", "unknown"],
)
def test_the_second_worker_sees_the_second_of_the_visible_gpus_alone(vendor, environ, expected):
    assert environment_of_worker(1, gpus(vendor=vendor, count=2), environ) == expected


def test_each_worker_takes_its_gpu_before_a_test_is_collected(pytester):
    pytester.makeconftest(
        STAND_IN.replace("count=1", "count=2")
        + """
    import pytest_park.selection as selection
    describe = selection._describe
    def described_as_nvidia(device):
        import dataclasses
        return dataclasses.replace(describe(device), vendor="nvidia")
    selection._describe = described_as_nvidia
"""
    )
    pytester.makepyfile(
        """
        import os

        seen = os.environ.get("CUDA_VISIBLE_DEVICES")

        def test_it():
            worker = os.environ["PYTEST_XDIST_WORKER"]
            assert seen == {"gw0": "0", "gw1": "1"}[worker]

        def test_it_too():
            test_it()
        """
    )
    result = pytester.runpytest_subprocess("--real-gpu", "-n", "auto", "--dist", "each", "--benchmark-disable")
    result.assert_outcomes(passed=4)
