"""DLPack shares the memory of a device tensor without a copy."""

from __future__ import annotations

import pytest
import torch

from pytest_park.fakegpu import FakeDevice


def test_a_tensor_is_shared_and_not_copied(fake_device: FakeDevice) -> None:
    tensor = torch.arange(6.0, device=fake_device.device).view(2, 3)
    before = fake_device.allocations
    shared = torch.from_dlpack(tensor.t())
    assert (shared.device, shared.shape, shared.stride()) == (fake_device.device, (3, 2), (1, 3))
    assert fake_device.allocations == before
    shared[0, 0] = 7
    assert tensor.tolist() == [[7, 1, 2], [3, 4, 5]]


def test_a_capsule_works_too(fake_device: FakeDevice) -> None:
    tensor = torch.arange(3.0, device=fake_device.device)
    shared = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
    shared.add_(1)
    assert tensor.tolist() == [1, 2, 3]


def test_the_memory_lives_as_long_as_the_last_of_both(fake_device: FakeDevice) -> None:
    tensor = torch.arange(3.0, device=fake_device.device)
    shared = torch.from_dlpack(tensor)
    del tensor
    assert fake_device.requested == 12
    assert shared.tolist() == [0, 1, 2]
    del shared
    assert fake_device.requested == 0


@pytest.mark.fake_device(count=2)
def test_the_index_of_the_device_survives(fake_device: FakeDevice) -> None:
    assert torch.from_dlpack(torch.ones(2, device="fakegpu:1")).device == torch.device("fakegpu:1")
    assert torch.ones(2, device="fakegpu:1").__dlpack_device__()[1] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_dtypes_survive(fake_device: FakeDevice, dtype: torch.dtype) -> None:
    tensor = torch.arange(3).to(dtype).to(fake_device.device)
    shared = torch.from_dlpack(tensor)
    assert shared.dtype is dtype
    assert torch.equal(shared.cpu(), tensor.cpu())


def test_tensors_of_the_host_are_torchs_own(fake_device: FakeDevice) -> None:
    tensor = torch.arange(3.0)
    shared = torch.from_dlpack(tensor)
    shared[0] = 5
    assert (tensor.tolist(), shared.device.type) == ([5, 1, 2], "cpu")
    assert tensor.__dlpack_device__()[0] == 1


def test_what_needs_a_gradient_is_refused_as_by_torch(fake_device: FakeDevice) -> None:
    with pytest.raises(BufferError, match="require"):
        torch.from_dlpack(torch.ones(2, device=fake_device.device, requires_grad=True))
