"""The bytes on the device are those of the live storages, whoever holds them, and they run out."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_park.fakegpu import FakeDevice
from pytest_park.sizes import MiB

# -- what is live -----------------------------------------------------------------------------------------------------


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
    ids=[
        "slice",
        "view",
        "reshape",
        "t",
        "expand",
        "as_strided",
        "detach",
        "dtype",
        "unfold",
        "chunk",
        "data",
        "parameter",
        "contiguous",
        "to",
    ],
)
def test_a_view_allocates_nothing_and_keeps_the_whole_storage(
    fake_device: FakeDevice, view: Callable[..., Any]
) -> None:
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
