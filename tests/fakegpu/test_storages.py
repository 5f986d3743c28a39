"""Storages on the device: made, cloned, resized, moved and shared like those of a device with a C++ allocator."""

from __future__ import annotations

import pytest
import torch

from pytest_park.fakegpu import FakeDevice, storages
from pytest_park.sizes import MiB

from ..lacking import without_swap


def test_a_storage_can_be_made_on_the_device(fake_device: FakeDevice) -> None:
    storage = torch.UntypedStorage(16, device="fakegpu")
    assert (storage.device, storage.nbytes()) == (fake_device.device, 16)
    assert fake_device.requested == 16
    tensor = torch.empty(0, device=fake_device.device).set_(storage)
    tensor.fill_(3)
    assert tensor.tolist() == [3] * 4
    del tensor, storage
    assert fake_device.requested == 0


@pytest.mark.parametrize("arguments", [(), (0,)])
def test_an_empty_storage_takes_no_memory(fake_device: FakeDevice, arguments: tuple[int, ...]) -> None:
    storage = torch.UntypedStorage(*arguments, device="fakegpu")
    assert (storage.nbytes(), storage.device.type, fake_device.allocations) == (0, "fakegpu", 0)


def test_a_storage_can_be_made_of_bytes(fake_device: FakeDevice) -> None:
    storage = torch.UntypedStorage([1, 2, 255], device=fake_device.device)
    assert list(storage.cpu()) == [1, 2, 255]


def test_storages_of_the_host_are_torchs_own(fake_device: FakeDevice) -> None:
    assert torch.UntypedStorage(8).device.type == "cpu"
    assert list(torch.UntypedStorage([1, 2])) == [1, 2]
    storage = torch.UntypedStorage(4)
    storage.resize_(16)
    assert storage.nbytes() == 16
    assert fake_device.allocations == 0


def test_a_clone_has_bytes_of_its_own(fake_device: FakeDevice) -> None:
    tensor = torch.arange(4.0, device=fake_device.device)
    clone = tensor.untyped_storage().clone()
    assert (clone.device, clone.nbytes()) == (fake_device.device, 16)
    assert clone.data_ptr() != tensor.untyped_storage().data_ptr()
    tensor.zero_()
    assert torch.empty(0, device=fake_device.device).set_(clone).tolist() == [0, 1, 2, 3]
    assert fake_device.requested == 32


def test_a_storage_moves_to_the_host_and_back(fake_device: FakeDevice) -> None:
    host = torch.arange(4.0, device=fake_device.device).untyped_storage().cpu()
    assert host.device.type == "cpu"
    assert torch.empty(0).set_(host).tolist() == [0, 1, 2, 3]
    back = host.to(device="fakegpu")
    assert back.device == fake_device.device
    assert torch.empty(0, device="fakegpu").set_(back).tolist() == [0, 1, 2, 3]


def test_a_storage_copies_from_a_storage(fake_device: FakeDevice) -> None:
    target = torch.zeros(4, device=fake_device.device)
    target.untyped_storage().copy_(torch.arange(4.0).untyped_storage())
    assert target.tolist() == [0, 1, 2, 3]


@without_swap
def test_resizing_to_nothing_frees_and_resizing_back_allocates(fake_device: FakeDevice) -> None:
    """As FSDP does to free the memory of a parameter and to bring it back."""
    tensor = torch.arange(1024.0, device=fake_device.device)
    view = tensor.view(32, 32)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert (fake_device.allocated, fake_device.requested, storage.nbytes()) == (0, 0, 0)
    assert tensor.shape == (1024,)
    storage.resize_(4096)
    assert (fake_device.allocated, storage.nbytes()) == (4096, 4096)
    tensor.fill_(3)
    assert view.sum() == 3072
    del tensor, view, storage
    assert fake_device.allocated == 0


@pytest.mark.parametrize("size", [pytest.param(8, marks=without_swap), 4096, pytest.param(10_000, marks=without_swap)])
def test_resizing_keeps_the_bytes_that_fit(fake_device: FakeDevice, size: int) -> None:
    tensor = torch.arange(1024.0, device=fake_device.device)
    tensor.untyped_storage().resize_(size)
    assert tensor.untyped_storage().nbytes() == fake_device.requested == size
    kept = min(size // 4, 1024)
    assert torch.equal(tensor[:kept].cpu(), torch.arange(float(kept)))


@without_swap
def test_a_storage_that_cannot_grow_stays_as_it_was(fake_device: FakeDevice) -> None:
    tensor = torch.arange(4.0, device=fake_device.device)
    fake_device.set_cap(2 * MiB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor.untyped_storage().resize_(8 * MiB)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert fake_device.requested == 16


def test_a_torch_that_cannot_resize_is_told_by_name(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "_SWAP", "_no_torch_has_this_")
    tensor = torch.arange(4.0, device=fake_device.device)
    view = tensor[1:3]
    for resize in (tensor.untyped_storage().resize_, tensor.resize_, view.resize_):
        with pytest.raises(NotImplementedError, match=r"_no_torch_has_this_, which torch has since 2\.12.* torch \d"):
            resize(64)
    assert (tensor.tolist(), fake_device.requested) == ([0, 1, 2, 3], 16)
    tensor.untyped_storage().resize_(16)  # as it is


@pytest.mark.parametrize("swap", ["_swap_data_ptr_", "_no_torch_has_this_"])
def test_a_tensor_can_be_resized(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, swap: str) -> None:
    monkeypatch.setattr(storages, "_SWAP", swap)  # torch 2.10 and 2.11 do not have the first either
    tensor = torch.arange(4.0, device=fake_device.device)
    tensor.resize_(8)
    assert tensor.shape == (8,)
    assert tensor[:4].tolist() == [0, 1, 2, 3]
    assert fake_device.requested == 32
    tensor.resize_(2, 2)
    assert tensor.tolist() == [[0, 1], [2, 3]]
    assert fake_device.requested == 32  # a smaller tensor keeps its storage
    tensor.resize_(1, 2, 2, 2, memory_format=torch.channels_last)
    assert tensor.stride() == (8, 1, 4, 2)


@without_swap
def test_views_see_the_storage_that_a_tensor_resize_made_larger(fake_device: FakeDevice) -> None:
    tensor = torch.arange(4.0, device=fake_device.device)
    view = tensor[1:3]
    tensor.resize_(8)
    tensor[1] = 9
    assert view.tolist() == [9, 2]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # that is what this test uses
def test_typed_storages_work(fake_device: FakeDevice) -> None:
    storage = torch.arange(4.0, device=fake_device.device)._typed_storage()
    assert storage.device == fake_device.device
    assert storage.tolist() == [0, 1, 2, 3]


def test_set_to_a_part_of_a_storage(fake_device: FakeDevice) -> None:
    storage = torch.arange(10.0, device=fake_device.device).untyped_storage()
    part = torch.empty(0, device=fake_device.device).set_(storage, 2, (2, 3), (1, 2))
    assert part.tolist() == [[2, 4, 6], [3, 5, 7]]
    assert fake_device.requested == 40


def test_a_tensor_knows_whether_it_is_set_to_another(fake_device: FakeDevice) -> None:
    tensor = torch.ones(4, device=fake_device.device)
    assert tensor.is_set_to(torch.empty(0, device=fake_device.device).set_(tensor))
    assert not tensor.is_set_to(tensor.clone())
    assert not tensor.is_set_to(tensor[:2])


def test_a_storage_knows_whether_it_is_shared(fake_device: FakeDevice) -> None:
    tensor = torch.arange(4.0, device=fake_device.device)
    assert tensor.untyped_storage().data_ptr() == tensor[2:].untyped_storage().data_ptr()
    assert tensor.untyped_storage()._cdata == tensor.view(2, 2).untyped_storage()._cdata
    assert tensor.data_ptr() + 8 == tensor[2:].data_ptr()
