"""What the fake device says, a real one says: the same scenarios on either. ``pytest tests/parity`` runs them on the
fake one, ``pytest tests/parity --real-gpu`` on the real one."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from pytest_park.devices import ParkDevice
from pytest_park.sizes import KiB, MiB


@pytest.fixture
def device(park_device: ParkDevice) -> torch.device:
    """Without what earlier tests left in the caches."""
    gc.collect()
    module(park_device).synchronize()
    park_device.empty_cache()
    park_device.reset_peak()
    return park_device.device


def module(park_device: ParkDevice) -> ModuleType:
    return torch.get_device_module(park_device.device)


def storage_of(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "allocated"),
    [(1, 512), (512, 512), (513, KiB), (MiB, MiB), (MiB + 1, MiB + 512), (30 * MiB + 3, 30 * MiB + 512)],
)
def test_blocks_are_multiples_of_512_bytes(
    park_device: ParkDevice, device: torch.device, requested: int, allocated: int
) -> None:
    before = park_device.allocated
    tensor = storage_of(requested, device)
    assert park_device.allocated - before == allocated
    del tensor
    assert park_device.allocated == before


@pytest.mark.parametrize(
    ("requested", "reserved"),
    [(1, 2 * MiB), (MiB, 2 * MiB), (2 * MiB, 20 * MiB), (10 * MiB, 10 * MiB), (10 * MiB + 1, 12 * MiB)],
)
def test_segments_have_the_sizes_of_the_caching_allocator(
    park_device: ParkDevice, device: torch.device, requested: int, reserved: int
) -> None:
    if park_device.reserved:
        pytest.skip("this process holds device memory already, which would be used first")
    tensor = storage_of(requested, device)
    assert park_device.reserved == reserved
    del tensor
    assert park_device.reserved == reserved
    park_device.empty_cache()
    assert park_device.reserved == 0


def test_the_peak_is_the_most_that_was_live_at_once(park_device: ParkDevice, device: torch.device) -> None:
    before = park_device.allocated
    first = storage_of(2 * MiB, device)
    del first
    second, third = storage_of(3 * MiB, device), storage_of(4 * MiB, device)
    del second
    assert park_device.peak_allocated - before == 7 * MiB
    park_device.reset_peak()
    assert park_device.peak_allocated - before == 4 * MiB
    assert third.nbytes == 4 * MiB


def test_an_operator_peaks_at_its_result(park_device: ParkDevice, device: torch.device) -> None:
    x = torch.ones(1024, 1024, device=device)
    park_device.reset_peak()
    before = park_device.allocated
    y = x + 1
    assert park_device.peak_allocated - before == y.nbytes


def test_a_new_data_frees_the_old_one_and_keeps_the_parameter(park_device: ParkDevice, device: torch.device) -> None:
    before = park_device.allocated
    weight = nn.Parameter(torch.ones(4 * MiB, device=device), requires_grad=False)
    same = weight
    weight.data = torch.zeros(1, device=device)
    assert park_device.allocated - before == 512
    assert same is weight
    assert weight.shape == (1,)


def test_too_much_is_an_out_of_memory_error_and_takes_nothing(park_device: ParkDevice, device: torch.device) -> None:
    before = park_device.allocated
    with pytest.raises(torch.OutOfMemoryError, match="out of memory. Tried to allocate"):
        storage_of(park_device.memory + MiB, device)
    assert park_device.allocated == before
    assert storage_of(MiB, device).nbytes == MiB


def test_record_stream_keeps_memory_no_longer_than_the_stream_works(
    park_device: ParkDevice, device: torch.device
) -> None:
    backend = module(park_device)
    side = backend.Stream()
    tensor = storage_of(20 * MiB, device)
    tensor.record_stream(side)
    del tensor
    before = park_device.reserved
    backend.synchronize()
    again = storage_of(20 * MiB, device)
    assert park_device.reserved == before
    assert again.nbytes == 20 * MiB


# -- values and layouts -----------------------------------------------------------------------------------------------


COMPUTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a transposed": lambda x: x.t() + 1,
    "contiguous": lambda x: x[::2, 1:].contiguous(),
    "clone of an expanded": lambda x: x.expand(2, 4, 6).clone(),
    "like a transposed": lambda x: torch.empty_like(x.t()).fill_(1),
    "reduction": lambda x: x.sum(0, keepdim=True),
    "concatenation": lambda x: torch.cat([x.t(), x.t()]),
    "dtype": lambda x: x.to(torch.float16),
    "channels last": lambda x: x.view(1, 2, 2, 6).to(memory_format=torch.channels_last) * 2,
    "sorted": lambda x: x.sort(descending=True).values,
}


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_results_have_the_values_and_strides_of_the_cpu(
    device: torch.device, compute: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    host = torch.arange(24.0).view(4, 6)
    expected, found = compute(host), compute(host.to(device))
    assert found.device == device
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)


def test_a_state_dict_survives_the_way_there_and_back(device: torch.device) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Conv1d(1, 2, 3))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parameters = list(module.parameters())
    module.to(device)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    module.to("cpu")
    assert all(torch.equal(loaded[name], value) for name, value in before.items())
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert all(left is right for left, right in zip(parameters, module.parameters(), strict=True))


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [torch.add, torch.matmul, torch.nn.functional.linear])
def test_tensors_of_two_devices_do_not_mix(device: torch.device, operator: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        operator(torch.ones(4, 4, device=device), torch.ones(4, 4))


def test_a_host_number_mixes_with_any_device(device: torch.device) -> None:
    assert (torch.ones(4, device=device) * torch.tensor(3.0)).tolist() == [3] * 4


def test_a_device_tensor_is_no_numpy_array(device: torch.device) -> None:
    with pytest.raises(TypeError, match="convert"):
        torch.ones(4, device=device).numpy()


# -- host memory and streams ------------------------------------------------------------------------------------------


def test_pinned_memory_says_so_and_its_copies_do_not(device: torch.device) -> None:
    pinned = torch.ones(16, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert not pinned.clone().is_pinned()
    assert not torch.ones(16).is_pinned()
    assert torch.ones(16).pin_memory().is_pinned()
    with pytest.raises(RuntimeError, match="pin"):
        pinned.to(device).pin_memory()


def test_a_prefetch_on_a_side_stream_arrives(park_device: ParkDevice, device: torch.device) -> None:
    backend = module(park_device)
    side, host = backend.Stream(), torch.arange(1024.0).pin_memory()
    with backend.stream(side):
        assert backend.current_stream() == side
        weight = host.to(device, non_blocking=True)
        arrived = side.record_event()
    backend.current_stream().wait_event(arrived)
    weight.record_stream(backend.current_stream())
    assert torch.equal((weight * 2).cpu(), host * 2)


def test_events_measure_and_answer(park_device: ParkDevice, device: torch.device) -> None:
    backend = module(park_device)
    start, end = backend.Event(enable_timing=True), backend.Event(enable_timing=True)
    start.record()
    torch.ones(64, device=device).sum()
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        backend.Event().elapsed_time(end)
