"""Park and restore give back every bit in the same layout, and no storage grows on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conftest import ALWAYS, bits
from park_core import Parking
from pytest_park.fakegpu import FakeDevice

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda bytes_: bytes_.view(4, 6, 2, 5),
    "zero-dim": lambda bytes_: bytes_[3],
    "one element": lambda bytes_: bytes_[5:6],
    "transposed": lambda bytes_: bytes_.view(24, 10).t(),
    "channels last": lambda bytes_: bytes_.view(4, 2, 5, 6).permute(0, 3, 1, 2),
    "sliced": lambda bytes_: bytes_.view(24, 10)[2:9:2, 3:],
    "expanded": lambda bytes_: bytes_[:4].expand(1000, 4),
    "overlapping": lambda bytes_: bytes_.as_strided((50, 7), (3, 1)),
}


def described(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_comes_back_bit_for_bit(
    fake_device: FakeDevice, dtype: torch.dtype, layout: str
) -> None:
    noise = torch.arange(240 * 16, dtype=torch.int64).mul_(37).to(torch.uint8)[: 240 * dtype.itemsize]
    base = noise.bool() if dtype is torch.bool else noise.view(dtype)
    component = nn.Module()
    component.weight = nn.Parameter(LAYOUTS[layout](base.to(fake_device.device)), requires_grad=False)
    before, values, resident = described(component.weight), bits(component.weight), fake_device.requested
    parking = Parking(component, "component", ALWAYS)
    for _ in range(2):
        assert parking.park().bytes_freed == resident
        assert fake_device.requested == 0
        assert described(component.weight) == before
        parking.restore()
        assert described(component.weight) == before
        assert torch.equal(bits(component.weight), values)
        assert fake_device.requested == resident
    del noise, base


class Aliases(nn.Module):
    """Five tensors over two storages: a tie, two overlapping slices, a transpose, and a buffer that shares."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        base = torch.arange(64.0, device=device)
        self.first = nn.Parameter(base[:40].view(8, 5))
        self.second = nn.Parameter(base[24:].view(8, 5).t())
        self.child = nn.Module()
        self.child.tied = self.first
        self.register_buffer("shared", base[10:20])
        self.lone = nn.Parameter(torch.ones(3, device=device))


def test_what_shared_bytes_shares_them_afterwards(fake_device: FakeDevice) -> None:
    component = Aliases(fake_device.device)
    resident = fake_device.requested
    parking = Parking(component, "component", ALWAYS)
    report = parking.park()
    assert (report.bytes_freed, fake_device.requested) == (resident, 0) == (64 * 4 + 3 * 4, 0)
    parking.restore()
    assert component.child.tied is component.first
    with torch.no_grad():
        component.first.view(-1)[30] = -1  # element 30 of the base
    assert component.second.t().reshape(-1)[6] == -1
    component.shared.fill_(-2)  # elements 10 to 19 of the base
    assert (component.first.view(-1)[10:20] == -2).all()
    assert fake_device.requested == resident


def test_restore_is_idempotent(fake_device: FakeDevice) -> None:
    component = Aliases(fake_device.device)
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    parking.restore()
    addresses = [weight.data_ptr() for weight in component.parameters()]
    allocations = fake_device.allocations
    fake_device.clear_transfers()
    assert parking.restore().bytes_to_device == 0
    assert [weight.data_ptr() for weight in component.parameters()] == addresses
    assert (fake_device.allocations, fake_device.transfers) == (allocations, [])


def test_the_parameter_stays_the_same_object(fake_device: FakeDevice) -> None:
    import weakref

    component = nn.Linear(4, 4).to(fake_device.device)
    weight, seen = component.weight, []
    weight.tag = "kept"
    weight.register_hook(seen.append)
    ref = weakref.ref(weight)
    parking = Parking(component, "component", ALWAYS)
    for turn in ("park", "restore"):
        getattr(parking, turn)()
        assert component.weight is weight is ref()
        assert isinstance(weight, nn.Parameter)
        assert (weight.tag, weight.requires_grad, weight.is_leaf) == ("kept", True, True)
    assert type(weight) is nn.Parameter
    component(torch.ones(1, 4, device=fake_device.device)).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("created_inside", [False, True])
@pytest.mark.parametrize("parked_inside", [False, True])
@pytest.mark.parametrize("restored_inside", [False, True])
def test_inference_parameters_stay_what_they_are(
    fake_device: FakeDevice, created_inside: bool, parked_inside: bool, restored_inside: bool
) -> None:
    with torch.inference_mode(created_inside):
        component = nn.Linear(4, 3).requires_grad_(False).to(fake_device.device)
    rows = torch.ones(2, 4, device=fake_device.device)
    expected = component(rows).cpu()
    parking = Parking(component, "component", ALWAYS)
    with torch.inference_mode(parked_inside):
        parking.park()
    with torch.inference_mode(restored_inside):
        parking.restore()
    assert component.weight.is_inference() == created_inside
    assert torch.equal(component(rows).cpu(), expected)
    assert component.weight.t().shape == (4, 3)
    if not created_inside:
        assert component.weight._version >= 0


def test_fifty_cycles_leave_no_trace(fake_device: FakeDevice) -> None:
    component = Aliases(fake_device.device)
    resident = fake_device.requested
    parking = Parking(component, "component", ALWAYS)
    copies = []
    for _ in range(50):
        fake_device.clear_transfers()
        parking.park()
        assert fake_device.requested == 0
        parking.restore()
        assert fake_device.requested == resident
        copies.append(len(fake_device.transfers))
    assert len(set(copies[1:])) == 1


def test_a_component_can_go_away_while_parked(fake_device: FakeDevice) -> None:
    component = Aliases(fake_device.device)
    parking = Parking(component, "component", ALWAYS)
    parking.park()
    del component
    assert parking.parked_bytes(fake_device.device) == 0
    assert fake_device.requested == 0


def test_the_report_counts_what_was_freed_and_names_what_was_not(fake_device: FakeDevice) -> None:
    component = Aliases(fake_device.device)
    component.register_buffer("table", torch.ones(8, device=fake_device.device))
    component.on_host = nn.Parameter(torch.ones(2))
    component.lookup = torch.ones(2, device=fake_device.device)
    view = component.first.detach()[2:]
    report = Parking(component, "component", ALWAYS).park()
    assert report.bytes_freed == 3 * 4
    reasons = {skipped.name: skipped.reason for skipped in report.skipped}
    assert reasons == {
        "first = second = shared": "a tensor outside the component's parameters and buffers views its bytes",
        "table": "buffers stay on the device",
        "on_host": "it is on the host already",
        "lookup": "a plain attribute, neither parameter nor buffer",
    }
    assert all(name in str(report) for name in reasons)
    view.fill_(7)
    assert component.first[2, 0] == 7  # what could not be freed still shares


def test_weights_that_came_back_to_another_address_are_reported(fake_device: FakeDevice) -> None:
    component = nn.Sequential(nn.Linear(64, 64), nn.Linear(4, 4)).requires_grad_(False).to(fake_device.device)
    parking = Parking(component, "component", ALWAYS)
    addresses = {name: weight.data_ptr() for name, weight in component.named_parameters()}
    taken = []
    for _ in range(3):
        parking.park()
        taken.append(torch.ones(64, 64, device=fake_device.device))
        report = parking.restore()
        now = {name: weight.data_ptr() for name, weight in component.named_parameters()}
        elsewhere = [weight.nbytes for name, weight in component.named_parameters() if now[name] != addresses[name]]
        assert report.bytes_relocated == sum(elsewhere) > 0
        addresses = now
    assert parking.restore().bytes_relocated == 0
