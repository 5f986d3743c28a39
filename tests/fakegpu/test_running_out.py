"""What the driver has, what it says, what may be taken, and what happens when there is no more."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_park.fakegpu import FakeDevice
from pytest_park.sizes import GiB, KiB, MiB

# -- the driver -------------------------------------------------------------------------------------------------------


@pytest.mark.fake_device(memory="100 MiB")
def test_driver_free_cap_and_reserve_are_three_things(fake_device: FakeDevice) -> None:
    assert fake_device.memory == 100 * MiB
    fake_device.other_process = 10 * MiB
    fake_device.set_cap(50 * MiB)
    assert torch.fakegpu.mem_get_info() == (90 * MiB, 100 * MiB)
    tensor = torch.ones(30 * MiB, dtype=torch.uint8, device=fake_device.device)
    assert torch.fakegpu.mem_get_info() == (60 * MiB, 100 * MiB)
    del tensor
    assert fake_device.free == 60 * MiB
    assert torch.fakegpu.memory_reserved() == fake_device.reserved == 30 * MiB
    fake_device.empty_cache()
    assert fake_device.free == 90 * MiB
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(51 * MiB, dtype=torch.uint8, device=fake_device.device)


@pytest.mark.fake_device(memory="100 MiB")
def test_another_process_takes_bytes_exactly(fake_device: FakeDevice) -> None:
    for nbytes in (0, 1, 12345, 100 * MiB):
        fake_device.other_process = nbytes
        assert fake_device.free == 100 * MiB - nbytes
        assert fake_device.other_process == nbytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1, device=fake_device.device)
    for nonsense in (-1, 100 * MiB + 1):
        with pytest.raises(ValueError, match="size|cannot hold"):
            fake_device.other_process = nonsense
    fake_device.other_process = "10 MiB"  # type: ignore[assignment]
    assert fake_device.free == 90 * MiB


@pytest.mark.fake_device(memory="100 MiB")
@pytest.mark.parametrize(
    ("report", "answer"),
    [
        ("honest", (60 * MiB, 100 * MiB)),
        ("free-equals-total", (100 * MiB, 100 * MiB)),
        ("zero", (0, 100 * MiB)),
        ("unified", (60 * MiB, 100 * MiB)),
    ],
)
def test_the_driver_can_be_told_what_to_say(fake_device: FakeDevice, report: Any, answer: tuple[int, int]) -> None:
    tensor = torch.ones(40 * MiB, dtype=torch.uint8, device=fake_device.device)
    fake_device.driver = report
    assert torch.fakegpu.mem_get_info() == answer
    assert torch.fakegpu.get_device_properties().is_integrated is (report == "unified")
    with pytest.raises(torch.OutOfMemoryError):  # whatever it says, there is no more
        torch.ones(61 * MiB, dtype=torch.uint8, device=fake_device.device)
    assert tensor.sum() == 40 * MiB


def test_a_driver_can_raise(fake_device: FakeDevice) -> None:
    fake_device.driver = "raises"
    with pytest.raises(RuntimeError, match="cannot report memory"):
        torch.fakegpu.mem_get_info()
    with pytest.raises(RuntimeError, match="cannot report memory"):
        _ = fake_device.free
    with pytest.raises(ValueError, match="'sometimes'; valid are honest"):
        fake_device.driver = "sometimes"  # type: ignore[assignment]


def test_the_process_fraction_is_the_cap(fake_device: FakeDevice) -> None:
    assert torch.fakegpu.get_per_process_memory_fraction() == 1.0
    torch.fakegpu.set_per_process_memory_fraction(0.25)
    assert torch.fakegpu.get_per_process_memory_fraction() == 0.25
    assert fake_device.cap == fake_device.memory // 4
    torch.fakegpu.set_per_process_memory_fraction(1.0)
    assert fake_device.cap is None
    for nonsense, error in ((1.5, ValueError), (-0.1, ValueError), (1, TypeError), ("0.5", TypeError)):
        with pytest.raises(error, match="fraction"):
            torch.fakegpu.set_per_process_memory_fraction(nonsense)


# -- out of memory ----------------------------------------------------------------------------------------------------


@pytest.mark.fake_device(memory="12 GiB")
def test_running_out_says_the_numbers_in_the_words_of_cuda(fake_device: FakeDevice) -> None:
    fake_device.other_process = 10 * GiB
    live = torch.empty(1 * GiB, dtype=torch.uint8, device=fake_device.device)
    cached = torch.empty(2 * MiB, dtype=torch.uint8, device=fake_device.device)
    part = torch.empty(3 * MiB, dtype=torch.uint8, device=fake_device.device)
    del cached
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * GiB, dtype=torch.uint8, device=fake_device.device)
    message = str(caught.value)
    assert "fakegpu out of memory. Tried to allocate 2.00 GiB." in message
    assert "GPU 0 has a total capacity of 12.00 GiB of which 1004.00 MiB is free." in message
    assert "11.02 GiB memory in use" in message
    assert "Of the allocated memory 1.00 GiB is allocated by PyTorch" in message
    assert "17.00 MiB is reserved by PyTorch but unallocated" in message
    assert "allowed" not in message
    fake_device.set_cap(int(1.5 * GiB))
    with pytest.raises(torch.OutOfMemoryError, match=re.escape("1.50 GiB allowed;")):
        torch.empty(1 * GiB, dtype=torch.uint8, device=fake_device.device)
    assert live.numel() + part.numel() == 1 * GiB + 3 * MiB


@pytest.mark.fake_device(memory="64 MiB")
@pytest.mark.parametrize(
    "want",
    [
        lambda: torch.empty(65 * MiB, dtype=torch.uint8, device="fakegpu"),
        lambda: torch.zeros(65 * MiB // 4).to("fakegpu"),
        lambda: torch.ones(1, device="fakegpu").expand(17 * MiB).clone(),
        lambda: torch.arange(65 * MiB // 8, device="fakegpu"),
        lambda: nn.Linear(4200, 4200).to("fakegpu"),
        lambda: torch.UntypedStorage(65 * MiB, device="fakegpu"),
        lambda: torch.empty(0, device="fakegpu").resize_(17 * MiB),
        lambda: torch.nn.functional.pad(torch.ones(1, device="fakegpu"), (0, 17 * MiB)),
    ],
    ids=["empty", "to", "clone", "arange", "module", "storage", "resize_", "pad"],
)
def test_whatever_allocates_can_run_out(fake_device: FakeDevice, want: Callable[[], Any]) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        want()
    del caught
    gc.collect()
    assert fake_device.allocated == 0


#: More than a process can address, so that no host has it, however it counts.
TOO_MUCH = 1 << 47
too_much = pytest.mark.parametrize(
    "want",
    [
        lambda: torch.empty(TOO_MUCH, dtype=torch.uint8, device="fakegpu"),
        lambda: torch.empty_strided((TOO_MUCH,), (1,), dtype=torch.uint8, device="fakegpu"),
        lambda: torch.ones(1, dtype=torch.uint8, device="fakegpu").repeat(TOO_MUCH),
        lambda: torch.ones(1, dtype=torch.uint8, device="fakegpu").expand(TOO_MUCH) + 1,
        lambda: torch.full((TOO_MUCH,), 1, dtype=torch.uint8, device="fakegpu"),
        lambda: torch.UntypedStorage(TOO_MUCH, device="fakegpu"),
    ],
    ids=["empty", "empty_strided", "repeat", "add", "full", "storage"],
)


@too_much
def test_what_the_host_does_not_have_either_is_a_shortage_of_the_device(
    fake_device: FakeDevice, want: Callable[[], Any]
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 128\.00 TiB"):
        want()
    assert fake_device.allocated == 0
    assert torch.fakegpu.memory_stats()["num_ooms"] == 1


def test_a_copy_that_the_host_has_no_memory_for_is_a_shortage_of_the_host(fake_device: FakeDevice) -> None:
    wide = torch.ones(1, dtype=torch.uint8, device="fakegpu").expand(TOO_MUCH)
    with pytest.raises(RuntimeError, match=f"DefaultCPUAllocator: .*allocate {TOO_MUCH} bytes") as caught:
        wide.to("cpu", memory_format=torch.contiguous_format)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    assert torch.fakegpu.memory_stats()["num_ooms"] == 0


@pytest.mark.fake_device(memory="200 TiB")
@too_much
def test_where_only_the_host_is_short_it_says_so(fake_device: FakeDevice, want: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"fakegpu:0 has room for 128\.00 TiB, but the host"):
        want()
    assert fake_device.allocated == 0


@pytest.mark.fake_device(memory="64 MiB")
def test_after_running_out_what_fits_still_fits(fake_device: FakeDevice) -> None:
    live = torch.ones(60 * MiB, dtype=torch.uint8, device=fake_device.device)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(5 * MiB, dtype=torch.uint8, device=fake_device.device)
    assert torch.ones(1 * MiB, dtype=torch.bool, device=fake_device.device).all()
    assert torch.fakegpu.memory_stats()["num_ooms"] == 2
    del live
    assert torch.ones(64 * MiB, dtype=torch.uint8, device=fake_device.device).numel() == 64 * MiB


def test_a_small_device_holds_exactly_what_it_can(fake_device: FakeDevice) -> None:
    fake_device.set_cap(2 * MiB)
    kept = [torch.empty(1, device=fake_device.device) for _ in range(2 * MiB // 512)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device=fake_device.device)
    kept.pop()
    torch.empty(128, device=fake_device.device)
    assert len(kept) == 4 * KiB - 1
