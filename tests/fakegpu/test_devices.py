"""Several devices and the host: what is where, what may mix, and what survives the way between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_park.fakegpu import FakeDevice
from pytest_park.sizes import MiB


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
    assert tensor.copy_(2.5).tolist() == [2.5, 2.5, 2.5]  # type: ignore[arg-type]  # torch takes it


_NOT_TAKEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "clamp": lambda tensor, number: tensor.clamp(min=number),
    "index_select": lambda tensor, number: tensor.index_select(0, number.long()),
    "written in place": lambda tensor, number: number.add_(tensor[0]),
    "written by out=": lambda tensor, number: torch.add(tensor[0], 1, out=number),
    "resized by out=": lambda tensor, number: torch.nonzero(tensor, out=number.long()),
    "state of a cell": lambda tensor, number: torch.nn.LSTMCell(3, 3).to(tensor.device)(
        tensor, (tensor, torch.zeros(3))
    ),
}


@pytest.mark.parametrize("call", _NOT_TAKEN.values(), ids=_NOT_TAKEN)
def test_a_number_on_the_host_is_refused_where_cuda_refuses_it(
    fake_device: FakeDevice, call: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    tensor, number = torch.ones(3, device=fake_device.device), torch.tensor(2.0)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device.* fakegpu:0 and cpu"):
        call(tensor, number)
    assert number == 2


_KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse_coo": lambda tensor: tensor.to_sparse(),
    "quantised": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor is deprecated")
@pytest.mark.parametrize(("kind", "make"), _KINDS.items(), ids=_KINDS)
def test_a_kind_of_tensor_that_there_is_not_is_refused_by_name(
    fake_device: FakeDevice, kind: str, make: Callable[[torch.Tensor], Any]
) -> None:
    with pytest.raises(NotImplementedError, match=f"fakegpu has no (torch.)?{kind} tensors"):
        make(torch.eye(2, device=fake_device.device))
    assert fake_device.requested == 0


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
