"""Headroom is what can really be allocated, on the device that was asked about, and nonsense is not trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import ALWAYS, MEMORY, Denoiser, non_layer_weights
from park_core import OffloadConfig, Parking, device_headroom, host_headroom
from park_core.memory import HostHeadroom, _cgroup_room
from pytest_park.fakegpu import FakeDevice

Headroom = Callable[[int], int]
MiB = 1024**2


def test_the_reserve_is_counted_once(fake_device: FakeDevice) -> None:
    empty = device_headroom(fake_device.device)
    assert empty.bytes == empty.driver_free == fake_device.memory
    weight = torch.empty(30 * MiB, dtype=torch.uint8, device=fake_device.device)
    del weight
    warm = device_headroom(fake_device.device)
    assert warm.reserved_unused > 0
    assert warm.driver_free == fake_device.memory - warm.reserved_unused
    assert warm.bytes == fake_device.memory


def test_the_process_cap_counts(fake_device: FakeDevice) -> None:
    fake_device.set_cap(64 * MiB)
    weight = torch.empty(10 * MiB, dtype=torch.uint8, device=fake_device.device)
    headroom = device_headroom(fake_device.device)
    assert headroom.cap == 64 * MiB
    assert headroom.bytes == 64 * MiB - fake_device.allocated
    assert headroom.driver_free > 64 * MiB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(headroom.bytes + 1, dtype=torch.uint8, device=fake_device.device)
    del weight


def test_other_processes_count(fake_device: FakeDevice) -> None:
    fake_device.other_process = fake_device.memory - 5 * MiB
    assert device_headroom(fake_device.device).bytes == 5 * MiB


@pytest.mark.fake_device(count=2)
def test_the_device_of_the_weights_is_asked(fake_device: FakeDevice) -> None:
    first, second = fake_device.devices
    second.other_process = second.memory - 2 * MiB
    component = Denoiser()
    component.configure_layerwise_offload(MEMORY, device=second.device)
    decision = component.park_non_layer_weights().decision
    assert decision.headroom is not None
    assert decision.headroom.bytes < 2 * MiB
    assert device_headroom(first.device).bytes == first.memory


def hold(device: FakeDevice, *sizes: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8, device=device.device) for size in sizes]


def test_free_pieces_that_are_too_small_are_no_room(fake_device: FakeDevice) -> None:
    held = hold(fake_device, *[2 * MiB] * 10)  # one segment of 20 MiB
    del held[1::2]
    fake_device.other_process = fake_device.memory - fake_device.reserved
    for request, room in ((0, 10), (2 * MiB, 10), (2 * MiB + 1, 0), (11 * MiB, 0)):
        headroom = device_headroom(fake_device.device, request=request)
        assert (headroom.bytes, headroom.fragmented) == (room * MiB, (10 - room) * MiB)
        assert headroom.reserved_unused == 10 * MiB
    with pytest.raises(torch.OutOfMemoryError):
        hold(fake_device, 2 * MiB + 1)
    assert len(hold(fake_device, *[2 * MiB] * 5)) == 5


def test_a_piece_is_room_for_what_fits_into_it(fake_device: FakeDevice) -> None:
    held = hold(fake_device, *[2 * MiB] * 10)
    del held[1], held[3:6]
    fake_device.other_process = fake_device.memory - fake_device.reserved
    headroom = device_headroom(fake_device.device, request=5 * MiB)
    assert (headroom.bytes, headroom.fragmented) == (6 * MiB, 2 * MiB)
    assert len(hold(fake_device, 5 * MiB)) == 1


def test_segments_that_are_wholly_free_are_room_for_anything(fake_device: FakeDevice) -> None:
    held = hold(fake_device, *[2 * MiB] * 20)
    del held[10:], held[1::2]
    fake_device.other_process = fake_device.memory - fake_device.reserved
    for request in (5 * MiB, 15 * MiB):
        assert device_headroom(fake_device.device, request=request).bytes == 20 * MiB
    assert len(hold(fake_device, 15 * MiB)) == 1


@pytest.mark.fake_device(count=2)
def test_pieces_on_another_device_are_not_counted(fake_device: FakeDevice) -> None:
    first, second = fake_device.devices
    whole, cut = (hold(device, *[2 * MiB] * 10) for device in (first, second))
    del whole[3:6], cut[1::2]
    for device in (first, second):
        device.other_process = device.memory - device.reserved
    assert device_headroom(first.device, request=6 * MiB).bytes == 6 * MiB
    assert device_headroom(second.device, request=6 * MiB).bytes == 0


def test_a_component_is_parked_for_a_need_that_only_fragments_would_cover(fake_device: FakeDevice) -> None:
    held = hold(fake_device, *[2 * MiB] * 5)
    component = nn.Linear(1024, 2560, bias=False, device=fake_device.device)  # the other half of the segment
    held += hold(fake_device, *[2 * MiB] * 10)
    del held[1::2]
    fake_device.other_process = fake_device.memory - fake_device.reserved
    report = Parking(component, "component", MEMORY).park(need=6 * MiB)
    assert (report.decision.verdict, report.decision.headroom.bytes) == ("park", 0)  # type: ignore[union-attr]
    assert report.decision.headroom.reserved_unused == 14 * MiB  # type: ignore[union-attr]
    assert len(hold(fake_device, 6 * MiB)) == 1


@pytest.mark.parametrize("report", ["free-equals-total", "raises"])
def test_a_reading_that_cannot_be_right_is_named_and_not_trusted(fake_device: FakeDevice, report: str) -> None:
    weight = torch.empty(100 * MiB, dtype=torch.uint8, device=fake_device.device)
    fake_device.driver = report  # type: ignore[assignment]
    headroom = device_headroom(fake_device.device)
    assert headroom.driver_free == fake_device.memory - fake_device.reserved
    assert headroom.bytes == fake_device.memory - fake_device.allocated
    assert ("raised" if report == "raises" else "although") in headroom.note
    del weight


@pytest.mark.parametrize("reading", [(0, 0), (-1, 12 * MiB), (13 * MiB, 12 * MiB), (0, 1 * MiB)])
def test_a_reading_that_contradicts_itself_or_the_allocator_is_not_trusted(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, reading: tuple[int, int]
) -> None:
    weight = torch.empty(2 * MiB, dtype=torch.uint8, device=fake_device.device)
    monkeypatch.setattr(torch.get_device_module("fakegpu"), "mem_get_info", lambda device: reading)
    headroom = device_headroom(fake_device.device)
    assert headroom.driver_free == fake_device.memory - fake_device.reserved
    assert f"{reading[0]} B free of {reading[1]} B" in headroom.note
    del weight


@pytest.mark.parametrize("reserved", [0, 100 * MiB])
def test_nothing_free_is_believed_where_it_can_be_true(fake_device: FakeDevice, reserved: int) -> None:
    weight = torch.empty(reserved, dtype=torch.uint8, device=fake_device.device)
    fake_device.other_process = fake_device.memory - fake_device.reserved
    honest = device_headroom(fake_device.device)
    assert (honest.bytes, honest.driver_free) == (0, 0)
    fake_device.other_process, fake_device.driver = 0, "zero"  # looks the same, so it is treated the same: as full
    assert device_headroom(fake_device.device) == honest
    assert "set parking" in honest.note
    del weight


def test_a_device_without_memory_of_its_own_is_declined(fake_device: FakeDevice, denoiser: Denoiser) -> None:
    fake_device.driver = "unified"
    decision = denoiser.park_non_layer_weights(need=1 << 50).decision
    assert decision.verdict == "refuse"
    assert "no memory of its own" in decision.reason


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_exactly_at_the_threshold_it_keeps(denoiser: Denoiser, headroom: Headroom, off: int) -> None:
    weights = sum(weight.nbytes for weight in non_layer_weights(denoiser).values())
    denoiser.configure_layerwise_offload(OffloadConfig(performance_mode="memory", significance=0.125))
    headroom(8 * (weights + off))
    decision = denoiser.park_non_layer_weights().decision
    assert decision.bytes == weights
    assert decision.threshold == weights + off
    assert decision.verdict == ("park" if off < 0 else "keep")


@pytest.mark.parametrize("need", ["less", "exactly", "more"])
def test_a_stated_need_decides(fake_device: FakeDevice, denoiser: Denoiser, headroom: Headroom, need: str) -> None:
    room = headroom(4 * MiB)
    wanted = room + {"less": -1, "exactly": 0, "more": 1}[need]
    report = denoiser.park_non_layer_weights(need=wanted)
    assert report.decision.verdict == ("park" if need == "more" else "keep")
    headroom.undo()  # type: ignore[attr-defined]


def test_a_host_without_room_is_respected(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    component = nn.Linear(64, 64).to(fake_device.device)
    parking = Parking(component, "component", ALWAYS)
    monkeypatch.setattr("park_core.decision.host_headroom", lambda: HostHeadroom(1000, 1000))
    before = fake_device.requested
    decision = parking.park().decision
    assert (decision.verdict, fake_device.requested) == ("refuse", before)
    assert "1000 B" in decision.reason


def test_the_host_has_what_the_kernel_and_the_control_groups_leave() -> None:
    host = host_headroom()
    assert 0 < host.bytes <= host.available
    assert host.bytes == (host.available if host.cgroup is None else min(host.available, host.cgroup))


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_counts_without_its_page_cache(tmp_path: Path, version: int) -> None:
    limit, usage = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    top = tmp_path / "memory" if version == 1 else tmp_path
    (tmp_path / "cgroup").write_text("5:cpu,memory:/a/b\n" if version == 1 else "0::/a/b\n")
    for group, bound in ((top / "a" / "b", "max" if version == 2 else 1 << 62), (top / "a", 1000)):
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(f"{bound}\n")
        (group / usage).write_text("700\n")
        (group / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _cgroup_room(tmp_path, tmp_path / "cgroup") == 1000 - 700 + 150


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert _cgroup_room(tmp_path, tmp_path / "none") is None
