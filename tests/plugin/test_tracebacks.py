"""A failure on the fake device is shown at the line of the test that met it."""

import pytest

FAILURES = """
import pytest
import torch
from pytest_park.fakegpu import activate, kernels

@pytest.mark.fake_device(memory="1 MiB")
def test_out_of_memory(fake_device):
    torch.empty(2**20 + 1, device="fakegpu")

def test_mixed_devices(fake_device):
    torch.ones(3, device="fakegpu") + torch.ones(3)

def test_index(fake_device):
    torch.ones(3, device="fakegpu").sum(4)

def test_race(fake_device):
    weight = torch.ones(3, device="fakegpu")
    with torch.Stream(device="fakegpu"):
        weight + 1

def test_host(fake_device):
    weight = torch.ones(3, device="fakegpu")
    fake_device.fail_host_copy()
    weight.cpu()

def test_without_the_fixture():
    with activate("1 MiB"):
        torch.empty(2**21, device="fakegpu")
"""


@pytest.mark.parametrize("style", ["long", "short"])
def test_the_lines_of_the_fake_device_are_left_out(pytester, style):
    pytester.makepyfile(FAILURES)
    result = pytester.runpytest_subprocess(f"--tb={style}", "-rN")
    result.assert_outcomes(failed=6)
    shown = result.stdout.str()
    for error in ("OutOfMemoryError: ", "same device", "IndexError: ", "RaceError: ", "MemoryError"):
        assert error in shown
    assert "fakegpu/" not in shown


def test_on_demand_they_are_there(pytester):
    pytester.makepyfile(FAILURES)
    result = pytester.runpytest_subprocess("--full-trace", "-k", "mixed")
    assert "fakegpu/kernels.py" in result.stdout.str().replace("\\", "/")


def test_a_fault_of_the_fake_device_itself_is_shown_where_it_is(pytester):
    pytester.makepyfile(
        """
        import torch
        from pytest_park.fakegpu import device

        def test_it(fake_device, monkeypatch):
            def broken(nbytes, stream):
                raise KeyError("a fault")
            monkeypatch.setattr(fake_device.allocator, "allocate", broken)
            torch.ones(3, device="fakegpu")
        """
    )
    result = pytester.runpytest_subprocess("--tb=short")
    result.assert_outcomes(failed=1)
    assert "fakegpu/device.py" in result.stdout.str()
