"""Pinned host memory is asked for, remembered by storage, and seen in the log of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pytest_park.fakegpu import FakeDevice, activate
from pytest_park.fakegpu.pinned import pinned_bytes


def test_pinning_makes_a_copy_that_is_pinned(fake_device: FakeDevice) -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    pinned = tensor.pin_memory()
    assert pinned.is_pinned()
    assert not tensor.is_pinned()
    assert torch.equal(pinned, tensor)
    assert pinned.data_ptr() != tensor.data_ptr()
    assert pinned.pin_memory() is pinned
    assert pinned.device.type == "cpu"


def test_views_and_storages_of_pinned_memory_are_pinned(fake_device: FakeDevice) -> None:
    pinned = torch.arange(4.0).pin_memory()
    assert pinned[1:].is_pinned()
    assert pinned.view(2, 2).t().is_pinned()
    assert pinned.untyped_storage().is_pinned()
    assert not pinned.clone().is_pinned()
    assert not (pinned + 1).is_pinned()


def test_a_storage_can_be_pinned(fake_device: FakeDevice) -> None:
    storage = torch.arange(4.0).untyped_storage()
    pinned = storage.pin_memory()
    assert pinned.is_pinned()
    assert not storage.is_pinned()
    assert torch.empty(0).set_(pinned).tolist() == [0, 1, 2, 3]


_FACTORIES: dict[str, Callable[..., Any]] = {
    "empty": lambda **how: torch.empty(3, **how),
    "empty_like": lambda **how: torch.empty_like(torch.ones(3), **how),
    "empty_strided": lambda **how: torch.empty_strided((3,), (1,), **how),
    "zeros": lambda **how: torch.zeros(3, **how),
    "zeros_like": lambda **how: torch.zeros_like(torch.ones(3), **how),
    "ones": lambda **how: torch.ones(3, **how),
    "full": lambda **how: torch.full((3,), 2.0, **how),
    "randn": lambda **how: torch.randn(3, **how),
    "arange": lambda **how: torch.arange(3, **how),
    "tensor": lambda **how: torch.tensor([1, 2, 3], **how),
    "new_empty": lambda **how: torch.ones(3).new_empty(3, **how),
    "new_zeros": lambda **how: torch.ones(3).new_zeros(3, **how),
    "linspace": lambda **how: torch.linspace(0, 1, 3, **how),
    "eye": lambda **how: torch.eye(3, **how),
    "randperm": lambda **how: torch.randperm(3, **how),
    "empty_permuted": lambda **how: torch.empty_permuted((3,), (0,), **how),
}
each_factory = pytest.mark.parametrize("factory", list(_FACTORIES.values()), ids=list(_FACTORIES))


@each_factory
def test_every_factory_pins_on_request(fake_device: FakeDevice, factory: Callable[..., Any]) -> None:
    assert factory(pin_memory=True).is_pinned()
    assert not factory(pin_memory=False).is_pinned()
    assert not factory().is_pinned()


def test_device_memory_cannot_be_pinned(fake_device: FakeDevice) -> None:
    tensor = torch.ones(3, device=fake_device.device)
    assert not tensor.is_pinned()
    with pytest.raises(RuntimeError, match="(?i)pin"):
        tensor.pin_memory()
    with pytest.raises(RuntimeError, match="(?i)pin"):
        torch.empty(3, device=fake_device.device, pin_memory=True)


def test_memory_is_no_longer_pinned_once_it_is_freed(fake_device: FakeDevice) -> None:
    for _ in range(20):  # an address comes back, its pinning does not
        pinned = torch.ones(3).pin_memory()
        assert pinned.is_pinned()
        del pinned
        plain = torch.ones(3)
        assert not plain.is_pinned()


def test_the_log_says_what_was_pinned_and_what_blocked(fake_device: FakeDevice) -> None:
    pageable = torch.arange(4.0)
    pinned = pageable.pin_memory()
    assert fake_device.transfers == []
    on_device = pageable.to("fakegpu")
    pinned.to("fakegpu", non_blocking=True)
    on_device.cpu()
    to_pinned = on_device.to("cpu", non_blocking=True)
    pinned.copy_(on_device, non_blocking=True)
    pageable.copy_(on_device)
    assert [(t.kind, t.bytes, t.pinned, t.blocking) for t in fake_device.transfers] == [
        ("h2d", 16, False, True),
        ("h2d", 16, True, False),
        ("d2h", 16, False, True),
        ("d2h", 16, True, False),
        ("d2h", 16, True, False),
        ("d2h", 16, False, True),
    ]
    assert to_pinned.is_pinned()  # as ``.to("cpu", non_blocking=True)`` from CUDA
    assert to_pinned.tolist() == [0, 1, 2, 3]


@pytest.mark.fake_device(count=2)
def test_the_log_has_copies_between_devices_and_none_within_one(fake_device: FakeDevice) -> None:
    first, second = fake_device.devices
    tensor = torch.ones(4, device=first.device)
    tensor.clone()
    tensor.copy_(torch.zeros(4, device=first.device))
    tensor.to(torch.float64)
    assert first.transfers == []
    tensor.to(second.device)
    assert [(t.kind, t.bytes) for t in second.transfers] == [("d2d", 16)]
    second.clear_transfers()
    assert second.transfers == []


def test_a_copy_that_changes_the_dtype_moves_the_bytes_of_its_source(fake_device: FakeDevice) -> None:
    moved = torch.ones(4).to(fake_device.device, torch.bfloat16)
    assert [(t.kind, t.bytes) for t in fake_device.transfers] == [("h2d", 16)]
    assert (moved.dtype, moved.tolist()) == (torch.bfloat16, [1, 1, 1, 1])


def test_a_module_moves_without_blocking(fake_device: FakeDevice) -> None:
    layer = torch.nn.Linear(4, 4)
    for parameter in layer.parameters():
        parameter.data = parameter.data.pin_memory()
    layer.to("fakegpu", non_blocking=True)
    assert [(t.kind, t.bytes, t.pinned, t.blocking) for t in fake_device.transfers] == [
        ("h2d", 64, True, False),
        ("h2d", 16, True, False),
    ]


def test_a_data_loader_pins(fake_device: FakeDevice) -> None:
    batches = list(DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(batch.is_pinned() for batch in batches)


def test_other_storages_over_pinned_memory_are_pinned(fake_device: FakeDevice) -> None:
    arena = torch.empty(1000, dtype=torch.uint8, pin_memory=True)
    piece = torch.utils.dlpack.from_dlpack(arena[300:400])
    assert piece.untyped_storage()._cdata != arena.untyped_storage()._cdata
    assert piece.is_pinned()
    assert not torch.empty(100, dtype=torch.uint8).is_pinned()
    assert pinned_bytes() == 1024
    del arena
    assert piece.is_pinned()
    del piece
    assert pinned_bytes() == 0


def test_a_function_that_somebody_puts_back_too_late_does_what_torch_does() -> None:
    with activate(memory="1 GiB"):
        kept = torch.empty
    outcomes = []
    for empty in (kept, torch.empty):
        try:
            outcomes.append(empty(4, pin_memory=True).is_pinned())
        except RuntimeError as error:
            outcomes.append(str(error))
    assert kept is not torch.empty
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] is not True or torch.cuda.is_available()


def test_what_stands_in_for_a_function_is_the_same_each_time() -> None:
    """TorchScript remembers it by identity for good, and would take another function at that place for it."""
    seen = []
    for _ in range(2):
        with activate(memory="1 GiB"):
            seen.append(torch.empty)
    assert seen[0] is seen[1]
