"""The bytes on the device are those of the live storages, whoever holds them, and they run out."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_park.fakegpu import FakeDevice
from pytest_park.sizes import GiB, KiB, MiB

# -- what is live -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [(torch.float32, 4000), (torch.bfloat16, 2000), (torch.complex64, 8000), (torch.bool, 1000), (torch.int64, 8000)],
)
def test_live_bytes_are_exact_and_blocks_are_rounded(fake_device: FakeDevice, dtype: torch.dtype, nbytes: int) -> None:
    tensor = torch.ones(1000, device=fake_device.device).to(dtype)
    assert fake_device.requested == nbytes
    assert fake_device.allocated == -(-nbytes // 512) * 512
    assert torch.fakegpu.memory_allocated() == fake_device.allocated
    del tensor
    assert fake_device.requested == fake_device.allocated == 0


def test_nothing_is_allocated_for_an_empty_tensor(fake_device: FakeDevice) -> None:
    empty = torch.empty(0, 5, device=fake_device.device)
    assert (fake_device.allocated, fake_device.allocations, empty.shape) == (0, 0, (0, 5))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[3:5],
        lambda t: t.view(4, 4),
        lambda t: t.reshape(2, 8),
        lambda t: t.t() if t.dim() == 2 else t.unsqueeze(0).t(),
        lambda t: t.expand(1000, 16),
        lambda t: t.as_strided((2, 2), (3, 1), 1),
        lambda t: t.detach(),
        lambda t: t.view(torch.int32),
        lambda t: t.unfold(0, 4, 2),
        lambda t: t.chunk(4)[2],
        lambda t: t.data,
        lambda t: nn.Parameter(t),
        lambda t: t.contiguous(),
        lambda t: t.to("fakegpu"),
    ],
    ids="slice view reshape t expand as_strided detach dtype unfold chunk data parameter contiguous to".split(),
)
def test_a_view_allocates_nothing_and_keeps_the_whole_storage(fake_device: FakeDevice, view: Callable[..., Any]) -> None:
    base = torch.arange(16.0, device=fake_device.device)
    before = fake_device.allocations
    made = view(base)
    assert (fake_device.allocations, fake_device.requested) == (before, 64)
    assert made.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    del base
    assert fake_device.requested == 64
    del made
    assert fake_device.requested == 0


def test_writing_through_a_view_is_seen_in_the_base(fake_device: FakeDevice) -> None:
    base = torch.zeros(3, 3, device=fake_device.device)
    base.t()[0].fill_(5)
    base.view(-1)[4:6] = torch.tensor([7.0, 8.0], device=fake_device.device)
    base.diagonal(1).mul_(2)
    assert base.tolist() == [[5, 0, 0], [5, 7, 16], [5, 0, 0]]


def test_assigning_data_frees_the_old_bytes(fake_device: FakeDevice) -> None:
    weight = nn.Parameter(torch.ones(1000, device=fake_device.device))
    assert fake_device.requested == 4000
    weight.data = torch.ones(10, device=fake_device.device)
    assert fake_device.requested == 40
    weight.data = torch.empty(0, device=fake_device.device)
    assert fake_device.requested == 0


def test_set_frees_the_old_bytes(fake_device: FakeDevice) -> None:
    tensor, other = torch.ones(1000, device=fake_device.device), torch.ones(10, device=fake_device.device)
    tensor.set_(other)
    assert fake_device.requested == 40
    assert tensor.tolist() == [1] * 10


def test_the_graph_of_autograd_keeps_what_it_saved(fake_device: FakeDevice) -> None:
    weight = torch.ones(1000, device=fake_device.device, requires_grad=True)
    loss = weight.sin().exp().sum()
    assert fake_device.requested == 4000 * 2 + 4  # the weight, which sin saved; the result of exp; the sum
    loss.backward()
    assert fake_device.requested == 4000 * 2 + 4  # the graph is gone, the gradient is there
    weight.grad = None
    del loss
    assert fake_device.requested == 4000


def test_no_grad_keeps_nothing(fake_device: FakeDevice) -> None:
    weight = torch.ones(1000, device=fake_device.device, requires_grad=True)
    with torch.no_grad():
        total = weight.sin().exp().sum()
    assert fake_device.requested == 4004
    assert total.requires_grad is False


def test_a_reference_cycle_keeps_its_bytes_until_it_is_collected(fake_device: FakeDevice) -> None:
    gc.disable()
    try:
        holder: list[Any] = [torch.ones(1000, device=fake_device.device)]
        holder.append(holder)
        del holder
        assert fake_device.requested == 4000
        gc.collect()
        assert fake_device.requested == 0
    finally:
        gc.enable()


def test_an_exception_that_is_over_keeps_nothing(fake_device: FakeDevice) -> None:
    def fails() -> None:
        local = torch.ones(1000, device=fake_device.device)
        local.view(7)

    with pytest.raises(RuntimeError, match="shape"):
        fails()
    sys.last_value = sys.last_traceback = None  # type: ignore[assignment]
    gc.collect()
    assert fake_device.requested == 0


def test_memory_is_freed_while_an_exception_passes(fake_device: FakeDevice) -> None:
    seen = []
    tensor: Any = torch.ones(1000, device=fake_device.device)
    try:
        try:
            raise ValueError
        finally:
            del tensor
            seen.append(fake_device.requested)
    except ValueError:
        seen.append(fake_device.requested)
    assert seen == [0, 0]


def test_a_kernel_that_fails_keeps_none_of_its_arguments(fake_device: FakeDevice) -> None:
    """On CUDA the arguments of a failed operator are C++ only: no frame of a traceback holds them."""
    fake_device.set_cap(2 * MiB)
    weight = torch.ones(64, 64, device=fake_device.device)
    gone = weakref.ref(weight.untyped_storage())
    rows = torch.ones(1, 64, device=fake_device.device).expand(100_000, 64)
    try:
        torch.nn.functional.linear(rows, weight.t())
    except torch.OutOfMemoryError:
        del weight
        assert gone() is None
    else:
        raise AssertionError("the result has 25.6 MB")


def test_an_output_that_does_not_fit_leaves_nothing_behind(fake_device: FakeDevice) -> None:
    fake_device.set_cap(2 * MiB)
    tensor = torch.ones(1000, device=fake_device.device)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            tensor.expand(1000, 1000).contiguous()
        assert fake_device.requested == 4000


def test_ten_threads_lose_no_bytes(fake_device: FakeDevice) -> None:
    kept: list[Any] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            layer = nn.Linear(8, 8).to(fake_device.device)
            for step in range(60):
                output = layer(torch.ones(seed + 1, 8, device=fake_device.device))
                output.sum().backward()
                if step % 20 == 0:
                    kept.append(torch.full((seed + 1,), float(step), device=fake_device.device))
                layer.zero_grad()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    gc.collect()
    assert fake_device.requested == sum(4 * (seed + 1) * 3 for seed in range(10))
    assert len(fake_device.live_storages()) == 30
    assert sorted({tensor.tolist()[0] for tensor in kept}) == [0, 20, 40]
    kept.clear()
    assert fake_device.allocated == 0


def test_the_live_storages_are_listed_largest_first(fake_device: FakeDevice) -> None:
    small, large = torch.ones(2, device=fake_device.device), torch.ones(500, device=fake_device.device)
    view = large[:3]
    listed = fake_device.live_storages()
    assert [(live.bytes, live.requested, live.device) for live in listed] == [
        (2048, 2000, fake_device.device),
        (512, 8, fake_device.device),
    ]
    assert listed[0].storage.data_ptr() == view.data_ptr()
    assert listed[1].storage.data_ptr() == small.data_ptr()


def test_every_allocation_is_counted(fake_device: FakeDevice) -> None:
    tensor = torch.ones(4, device=fake_device.device)
    before = fake_device.allocations
    tensor.add_(1)
    tensor.view(2, 2).mul_(2)
    assert fake_device.allocations == before
    tensor + tensor
    assert fake_device.allocations == before + 1


def test_peaks_count_what_was_live_at_once(fake_device: FakeDevice) -> None:
    torch.ones(1 * MiB, dtype=torch.uint8, device=fake_device.device)
    torch.ones(1 * MiB, dtype=torch.uint8, device=fake_device.device)
    assert fake_device.peak_allocated == torch.fakegpu.max_memory_allocated() == 1 * MiB
    both = [torch.ones(1 * MiB, dtype=torch.uint8, device=fake_device.device) for _ in range(2)]
    assert fake_device.peak_allocated == 2 * MiB
    both.pop()
    fake_device.reset_peak()
    assert fake_device.peak_allocated == 1 * MiB
    torch.fakegpu.reset_peak_memory_stats()
    assert torch.fakegpu.memory_stats()["allocated_bytes.all.peak"] == 1 * MiB


def test_fresh_and_uninitialised_memory_is_poison(fake_device: FakeDevice) -> None:
    for _ in range(2):
        assert torch.empty(100, device=fake_device.device).isnan().all()
    assert torch.empty(4, dtype=torch.float16, device=fake_device.device).isnan().all()
    assert torch.empty_strided((2, 2), (4, 1), device=fake_device.device).isnan().all()
    assert torch.ones(3, device=fake_device.device).new_empty(3).isnan().all()


# -- the driver ---------------------------------------------------------------------------------------------------------


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


# -- out of memory ------------------------------------------------------------------------------------------------------


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
    ids="empty to clone arange module storage resize_ pad".split(),
)
def test_whatever_allocates_can_run_out(fake_device: FakeDevice, want: Callable[[], Any]) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        want()
    del caught
    gc.collect()
    assert fake_device.allocated == 0


@pytest.mark.fake_device(memory="64 MiB")
def test_after_running_out_what_fits_still_fits(fake_device: FakeDevice) -> None:
    live = torch.ones(60 * MiB, dtype=torch.uint8, device=fake_device.device)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(5 * MiB, dtype=torch.uint8, device=fake_device.device)
    assert torch.ones(4 * MiB, dtype=torch.bool, device=fake_device.device).all()
    assert torch.fakegpu.memory_stats()["num_ooms"] == 2
    del live
    assert torch.ones(64 * MiB, dtype=torch.uint8, device=fake_device.device).numel() == 64 * MiB


# -- devices ------------------------------------------------------------------------------------------------------------


@pytest.mark.fake_device(count=2)
def test_devices_are_counted_apart(fake_device: FakeDevice) -> None:
    first, second = fake_device.devices
    on_first, on_second = torch.ones(10, device="fakegpu:0"), torch.ones(1000, device="fakegpu:1")
    assert (first.requested, second.requested) == (40, 4000)
    assert torch.fakegpu.memory_allocated(1) == torch.fakegpu.memory_allocated("fakegpu:1") == 4096
    assert torch.fakegpu.memory_allocated(torch.device("fakegpu:0")) == 512
    second.set_cap(0)
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1"):
        torch.ones(10 * MiB, device="fakegpu:1")
    torch.ones(10 * MiB, device="fakegpu:0")
    second.set_cap(None)
    moved = on_first.to("fakegpu:1")
    assert moved.device == second.device
    assert (first.requested, second.requested) == (40, 4040)
    del on_second
    assert second.requested == 40


@pytest.mark.fake_device(count=2)
def test_the_current_device_is_where_things_are_made(fake_device: FakeDevice) -> None:
    assert torch.ones(1, device="fakegpu").device == torch.device("fakegpu:0")
    with torch.fakegpu.device(1):
        assert torch.fakegpu.current_device() == 1
        assert torch.ones(1, device="fakegpu").device == torch.device("fakegpu:1")
        assert torch.ones(1).to("fakegpu").device == torch.device("fakegpu:1")
    assert torch.fakegpu.current_device() == 0
    torch.fakegpu.set_device(1)
    assert torch.ones(1, device="fakegpu").device.index == 1
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.fakegpu.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]  # as on CUDA, it belongs to the thread


def _mixtures() -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    return {
        "add": lambda a, b: a + b,
        "add_": lambda a, b: a.clone().add_(b),
        "matmul": lambda a, b: a @ b,
        "linear": lambda a, b: torch.nn.functional.linear(a, b),
        "cat": lambda a, b: torch.cat([a, b]),
        "stack": lambda a, b: torch.stack([a, b]),
        "where": lambda a, b: torch.where(a > 0, a, b),
        "lerp": lambda a, b: torch.lerp(a, b, 0.5),
        "addmm": lambda a, b: torch.addmm(a, a, b),
        "conv": lambda a, b: torch.nn.functional.conv1d(a[None], b[None]),
        "attention": lambda a, b: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], b[None]),
        "layer_norm": lambda a, b: torch.nn.functional.layer_norm(a, (4,), weight=b[0]),
        "embedding": lambda a, b: torch.nn.functional.embedding(a.long(), b),
        "gather": lambda a, b: a.gather(0, b.long()),
        "masked_fill": lambda a, b: a.masked_fill(b > 0, 0.0),
        "out": lambda a, b: torch.add(a, a, out=b),
        "dot": lambda a, b: torch.dot(a[0], b[0]),
        "mse_loss": lambda a, b: torch.nn.functional.mse_loss(a, b),
    }


@pytest.mark.fake_device(count=2)
@pytest.mark.parametrize("other", ["cpu", "fakegpu:1"])
@pytest.mark.parametrize("mix", list(_mixtures().values()), ids=list(_mixtures()))
def test_mixing_devices_raises_torchs_own_error(fake_device: FakeDevice, mix: Callable[..., Any], other: str) -> None:
    here, there = torch.ones(4, 4, device=fake_device.device), torch.ones(4, 4, device=other)
    for pair in ((here, there), (there, here)):
        with pytest.raises(RuntimeError, match="(?i)device") as caught:
            mix(*pair)
        assert "fakegpu:0" in str(caught.value)
        assert other in str(caught.value)


def test_a_number_on_the_host_may_mix_as_on_cuda(fake_device: FakeDevice) -> None:
    tensor = torch.arange(3.0, device=fake_device.device)
    assert (tensor * torch.tensor(2.0)).tolist() == [0, 2, 4]
    assert (torch.tensor(2.0) + tensor).tolist() == [2, 3, 4]
    assert torch.where(tensor > 1, tensor, torch.tensor(9.0)).tolist() == [9, 9, 2]
    tensor.add_(torch.tensor(1.0))
    assert tensor.tolist() == [1, 2, 3]
    assert tensor[torch.tensor([2, 0])].tolist() == [3, 1]
    assert tensor[torch.tensor([True, False, True])].tolist() == [1, 3]
    tensor[torch.tensor([0, 1])] = 5
    assert tensor.tolist() == [5, 5, 3]


def test_a_device_tensor_has_no_numpy(fake_device: FakeDevice) -> None:
    with pytest.raises(TypeError, match=r"can't convert fakegpu:0 device type tensor to numpy.*\.cpu\(\)"):
        torch.ones(2, device=fake_device.device).numpy()


def test_channels_last_and_other_strides_survive_the_way_to_the_device_and_back(fake_device: FakeDevice) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    video = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    flipped = torch.randn(4, 6).t()
    for tensor in (image, video, flipped):
        moved = tensor.to(fake_device.device)
        assert moved.stride() == tensor.stride()
        assert torch.equal(moved.cpu(), tensor)
        assert moved.cpu().stride() == tensor.stride()
        assert torch.empty_like(moved).stride() == tensor.stride()
        assert moved.contiguous().is_contiguous()
    assert torch.empty(2, 3, 4, 5, device="fakegpu", memory_format=torch.channels_last).stride() == (60, 1, 15, 3)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex32, torch.complex128, torch.bool,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float64,
    ],
    ids=str,
)  # fmt: skip
def test_every_dtype_makes_the_round_trip(fake_device: FakeDevice, dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 5).to(dtype)
    moved = tensor.to(fake_device.device)
    assert moved.dtype is dtype
    assert fake_device.requested == 4 * tensor.element_size()
    back = moved.cpu()
    assert back.dtype is dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_bytes_below_a_byte_travel_too(fake_device: FakeDevice) -> None:
    nibbles = torch.arange(4, dtype=torch.uint8).view(torch.uint4)
    moved = nibbles.to(fake_device.device)
    assert (moved.dtype, moved.device.type) == (torch.uint4, "fakegpu")
    assert torch.equal(moved.cpu().view(torch.uint8), torch.arange(4, dtype=torch.uint8))


def test_a_small_device_holds_exactly_what_it_can(fake_device: FakeDevice) -> None:
    fake_device.set_cap(2 * MiB)
    kept = [torch.empty(1, device=fake_device.device) for _ in range(2 * MiB // 512)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device=fake_device.device)
    kept.pop()
    torch.empty(128, device=fake_device.device)
    assert len(kept) == 4 * KiB - 1
