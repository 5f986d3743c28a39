"""Copies are ordered with what runs on the other streams: the sanitizer of the fake device finds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from conftest import Denoiser, assert_same_bits, snapshot
from park_core import LayerwiseOffloadManager, OffloadConfig
from park_core.parked_tensor import parked_group
from pytest_park.fakegpu import FakeDevice


@pytest.fixture(params=["pageable", "pinned", "by the courier"])
def pin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "by the courier":  # as if layers were large
        monkeypatch.setattr("park_core.transfer._BUFFER_BYTES", 1024)
        monkeypatch.setattr("park_core.transfer._WORTH_STAGING", 2048)
    return request.param == "pinned"  # type: ignore[no-any-return]


@pytest.fixture
def component(fake_device: FakeDevice, pin: bool) -> Denoiser:
    torch.manual_seed(0)
    component = Denoiser(blocks=4).eval().requires_grad_(False)
    config = OffloadConfig(parking="always", pin_memory=pin, resident_layers=1)
    component.configure_layerwise_offload(config, device=fake_device.device)
    return component


@pytest.fixture
def manager(component: Denoiser) -> LayerwiseOffloadManager:
    return component.layerwise_offload_managers[0]


@pytest.fixture
def side(fake_device: FakeDevice) -> Iterator[AbstractContextManager[None]]:
    """Work inside this context runs on a stream of its own, after what was there before, before what comes later."""

    class Side:
        def __enter__(self) -> None:
            self.stream = torch.fakegpu.Stream(device=fake_device.device)
            self.stream.wait_stream(torch.fakegpu.current_stream())
            self.inside = torch.fakegpu.stream(self.stream)
            self.inside.__enter__()

        def __exit__(self, *failure: object) -> None:
            self.inside.__exit__(*failure)
            torch.fakegpu.current_stream().wait_stream(self.stream)

    yield Side()  # type: ignore[misc]
    assert fake_device.races == ()


@pytest.mark.parametrize("where", ["on the current stream", "on a side stream", "prefetched elsewhere"])
def test_a_request_is_right_on_any_stream(
    fake_device: FakeDevice,
    component: Denoiser,
    tokens: Tensor,
    side: AbstractContextManager[None],
    where: str,
) -> None:
    values, expected = snapshot(component), component(tokens).cpu()
    for _ in range(3):
        component.restore_non_layer_weights()
        with nullcontext() if where == "on the current stream" else side:
            if where != "prefetched elsewhere":
                component.prepare_for_next_req()
            else:
                with torch.fakegpu.stream(torch.fakegpu.default_stream()):
                    component.prepare_for_next_req()
            for _ in range(2):
                result = component(tokens)
        assert torch.equal(result.cpu(), expected)
        component.layerwise_offload_managers[0].release_all()
        component.park_non_layer_weights()
    assert_same_bits(snapshot(component), values)
    assert fake_device.races == ()


def test_memory_of_a_released_layer_is_not_reused_under_what_still_runs(
    fake_device: FakeDevice, component: Denoiser, manager: LayerwiseOffloadManager, tokens: Tensor
) -> None:
    hidden = torch.ones(64, 64, device=fake_device.device)
    other = torch.fakegpu.Stream(device=fake_device.device)
    other.wait_stream(torch.fakegpu.current_stream())
    manager.prefetch_layer(2)
    with torch.fakegpu.stream(other):
        manager.prefetch_layer(2, non_blocking=False)
        result = component.blocks[2].weight @ hidden
        manager.release_layer(2)
    for _ in range(4):  # whatever takes the memory now, on the stream it came from
        torch.zeros(64, 64, device=fake_device.device)
    del result
    assert fake_device.races == ()


GIVE_UP: dict[str, Callable[[LayerwiseOffloadManager], None]] = {
    "released": lambda manager: manager.release_layer(2),
    "removed": lambda manager: manager.remove(),
}


@pytest.mark.parametrize("how", GIVE_UP)
def test_memory_of_a_layer_that_is_given_up_on_its_way_is_not_reused_under_the_copy(
    fake_device: FakeDevice, manager: LayerwiseOffloadManager, how: str
) -> None:
    manager.prefetch_layer(2)
    GIVE_UP[how](manager)
    for _ in range(4):
        torch.zeros(64, 64, device=fake_device.device)
    assert fake_device.races == ()


WRITES: dict[str, Callable[[Denoiser, Tensor], object]] = {
    "copy_": lambda component, value: component.blocks[2].weight.copy_(value),
    "data": lambda component, value: component.blocks[2].weight.data.copy_(value),
    "update": lambda component, value: component.update_cpu_weights({"blocks.2.weight": value}),
    "load": lambda component, value: component.load_state_dict({"blocks.2.weight": value}, strict=False),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_layer_that_is_on_its_way_is_in_its_next_use(
    fake_device: FakeDevice, component: Denoiser, manager: LayerwiseOffloadManager, write: str
) -> None:
    manager.prefetch_layer(2)
    value = torch.full((64, 64), 3.0)
    with torch.no_grad():
        WRITES[write](component, value)
    manager.prefetch_layer(2, non_blocking=False)
    assert torch.equal(component.blocks[2].weight.cpu(), value)
    manager.release_layer(2)
    assert torch.equal(component.blocks[2].weight.detach(), value)


def test_a_copy_that_fails_halfway_leaves_nothing_running(
    fake_device: FakeDevice, manager: LayerwiseOffloadManager
) -> None:
    manager.release_all()
    for k in (1, 2):
        fake_device.fail_device_copy(after=k)
        with pytest.raises(torch.OutOfMemoryError):
            manager.prefetch_layer(3, non_blocking=False)
        for _ in range(3):
            torch.zeros(64, 64, device=fake_device.device)
    manager.prefetch_layer(3, non_blocking=False)
    assert fake_device.races == ()


def test_a_layer_stays_pinned_after_a_write(
    fake_device: FakeDevice, component: Denoiser, manager: LayerwiseOffloadManager, pin: bool
) -> None:
    manager.prefetch_layer(1, non_blocking=False)
    with torch.no_grad():
        component.blocks[1].weight.add_(1)
    value = component.blocks[1].weight.cpu()
    manager.release_layer(1)
    group = parked_group(component.blocks[1].weight)
    assert group is not None
    assert group.host is not None
    assert group.host.kind == ("pinned" if pin else "pageable")
    manager.prefetch_layer(1, non_blocking=False)
    assert torch.equal(component.blocks[1].weight.cpu(), value)
