"""Large layers in pageable memory are brought by a thread: whoever prefetches goes on at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conftest import Denoiser, assert_same_bits, snapshot
from park_core import LayerwiseOffloadManager, OffloadConfig, StaleMappingError, layerwise_offloadable
from park_core.parked_tensor import is_parked
from park_core.transfer import Staging
from pytest_park.fakegpu import FakeDevice


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("park_core.transfer._BUFFER_BYTES", 1024)
    monkeypatch.setattr("park_core.transfer._WORTH_STAGING", 2048)


@pytest.fixture
def component(fake_device: FakeDevice) -> Denoiser:
    torch.manual_seed(0)
    component = Denoiser().eval().requires_grad_(False)
    component.configure_layerwise_offload(OffloadConfig(), device=fake_device.device)
    return component


@pytest.fixture
def manager(component: Denoiser) -> LayerwiseOffloadManager:
    return component.layerwise_offload_managers[0]


class Gate:
    """Holds whoever copies to the device, and knows which thread that was."""

    def __init__(self) -> None:
        self.reached, self.open, self.threads = threading.Event(), threading.Event(), set[str]()

    def __call__(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.reached.set()
        assert self.open.wait(timeout=5)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, copy = Gate(), Staging._up

    def held(self: Staging, target: Tensor, source: Tensor) -> None:
        gate()
        copy(self, target, source)

    monkeypatch.setattr(Staging, "_up", held)
    yield gate
    gate.open.set()


def test_whoever_prefetches_goes_on_while_the_layer_is_copied(
    component: Denoiser, manager: LayerwiseOffloadManager, gate: Gate
) -> None:
    values = snapshot(component)
    manager.prefetch_layer(2)
    assert gate.reached.wait(timeout=5)
    assert is_parked(component.blocks[2].weight)  # and here we are
    gate.open.set()
    manager.prefetch_layer(2, non_blocking=False)
    assert not is_parked(component.blocks[2].weight)
    assert_same_bits(snapshot(component), values)
    assert gate.threads == {"courier_0"}


def test_a_forward_with_the_courier_is_the_same(fake_device: FakeDevice, component: Denoiser, tokens: Tensor) -> None:
    values = snapshot(component)
    component.configure_layerwise_offload(OffloadConfig(resident_layers=4))
    expected = component(tokens)
    component.configure_layerwise_offload(OffloadConfig(prefetch=2))
    for _ in range(3):
        assert torch.equal(component(tokens), expected)
    assert_same_bits(snapshot(component), values)
    assert fake_device.races == ()


def test_a_small_weight_that_comes_first_does_not_keep_the_large_ones_from_being_staged(
    fake_device: FakeDevice,
) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(2)))
    component = layerwise_offloadable(nn.Sequential(layers), ["0"], config=OffloadConfig(), device=fake_device.device)
    fake_device.clear_transfers()
    component.layerwise_offload_managers[0].load_all_layers()  # type: ignore[union-attr,index]
    assert [t.bytes for t in fake_device.transfers if t.pinned] == [1024] * 2 * 16
    assert sum(t.bytes for t in fake_device.transfers if not t.pinned) == 2 * 3 * 256


GIVE_UP: dict[str, Callable[[LayerwiseOffloadManager], None]] = {
    "released": lambda manager: manager.release_layer(2),
    "all released": lambda manager: manager.release_all(),
    "removed": lambda manager: manager.remove(),
}


@pytest.mark.parametrize("how", GIVE_UP)
@pytest.mark.parametrize("fails", [False, True])
def test_giving_a_layer_up_waits_for_the_courier(
    fake_device: FakeDevice, manager: LayerwiseOffloadManager, gate: Gate, how: str, fails: bool
) -> None:
    idle = fake_device.requested
    if fails:
        fake_device.fail_device_copy(after=3)
    manager.prefetch_layer(2)
    assert gate.reached.wait(timeout=5)
    threading.Timer(0.05, gate.open.set).start()
    GIVE_UP[how](manager)
    assert gate.open.is_set()
    assert fake_device.requested == idle
    for _ in range(4):  # whatever takes the memory now
        torch.zeros(64, 64, device=fake_device.device)
    assert fake_device.races == ()


def test_what_goes_wrong_is_raised_when_the_layer_is_needed(
    fake_device: FakeDevice, component: Denoiser, manager: LayerwiseOffloadManager
) -> None:
    values, idle = snapshot(component), fake_device.requested
    for k in (1, 5):
        fake_device.fail_device_copy(after=k)
        manager.prefetch_layer(2)
        with pytest.raises(torch.OutOfMemoryError):
            manager.prefetch_layer(2, non_blocking=False)
        assert is_parked(component.blocks[2].weight)
        assert fake_device.requested == idle
    manager.prefetch_layer(2, non_blocking=False)
    assert_same_bits(snapshot(component), values)


def test_an_interrupted_wait_leaves_the_layer_on_its_way(
    fake_device: FakeDevice,
    component: Denoiser,
    manager: LayerwiseOffloadManager,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = snapshot(component)
    manager.prefetch_layer(2)
    allocations = fake_device.allocations
    with monkeypatch.context() as patch:

        def interrupted(self: Future[object]) -> object:
            raise KeyboardInterrupt

        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.prefetch_layer(2, non_blocking=False)
    gate.open.set()
    manager.prefetch_layer(2, non_blocking=False)
    assert not is_parked(component.blocks[2].weight)
    assert fake_device.allocations == allocations  # it did not set out again
    assert_same_bits(snapshot(component), values)


def test_layers_that_are_mapped_from_a_checkpoint_go_by_the_courier(
    fake_device: FakeDevice, tmp_path: Path, gate: Gate, tokens: Tensor
) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the format of mapped checkpoints")
    component = Denoiser().eval().requires_grad_(False)
    path = tmp_path / "denoiser.safetensors"
    safetensors.save_file({f"blocks.{k}": v for k, v in component.blocks.state_dict().items()}, path)
    component.load_state_dict(safetensors.load_file(path), assign=True, strict=False)
    values = snapshot(component)
    gate.open.set()
    component.configure_layerwise_offload(OffloadConfig(), device=fake_device.device)
    gate.threads.clear()
    component(tokens)
    assert gate.threads == {"courier_0"}
    assert_same_bits(snapshot(component), values)
    manager = component.layerwise_offload_managers[0]
    manager.release_all()
    path.unlink()
    manager.prefetch_layer(2)
    with pytest.raises(StaleMappingError, match=r"blocks\.2"):
        manager.prefetch_layer(2, non_blocking=False)
