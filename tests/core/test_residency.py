"""Components take turns on the device: ready inside a use, idle after it."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import Tensor, nn

from conftest import ALWAYS, MEMORY, Denoiser, assert_same_bits, snapshot
from park_core import (
    ComponentOffloadStrategy,
    ComponentResidencyManager,
    ComponentResidencyStrategy,
    LayerwiseOffloadStrategy,
    OffloadConfig,
    ParkError,
    ParkReport,
    ResidentStrategy,
    RestoreReport,
    layerwise_offloadable,
)
from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import FakeDevice


def vae() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).eval().requires_grad_(False)


def test_an_unconfigured_component_is_resident(fake_device: FakeDevice) -> None:
    component = vae()
    values = snapshot(component)
    manager = ComponentResidencyManager({"vae": component}, device=fake_device.device)
    with manager.use("vae") as ready:
        assert ready is component
        ready(torch.ones(2, 64, device=fake_device.device))
    resident = fake_device.requested
    assert resident > 0
    manager.finish_request()
    assert fake_device.requested == resident
    assert_same_bits(snapshot(component), values)


STRATEGIES: dict[str, ComponentResidencyStrategy] = {
    "resident": ResidentStrategy(),
    "offloaded": ComponentOffloadStrategy(),
    "layerwise": LayerwiseOffloadStrategy(),
}


def in_float32() -> nn.Module:
    torch.manual_seed(1)
    component = nn.Module()
    component.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
    component.head = nn.Linear(256, 256)
    component.register_buffer("steps", torch.arange(4))
    component.quantised = nn.Parameter(torch.ones(256).to(torch.float8_e4m3fn), requires_grad=False)
    return component.requires_grad_(False)


@pytest.mark.parametrize("when", ["from load", "at a use"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_component_is_held_in_its_compute_dtype_before_it_comes(
    fake_device: FakeDevice, strategy: str, when: str
) -> None:
    component = in_float32()
    expected = {
        name: value.bfloat16() if value.dtype == torch.float32 else value for name, value in snapshot(component).items()
    }
    size = sum(value.nbytes for value in expected.values())
    dtype = torch.bfloat16 if when == "from load" else None
    config = OffloadConfig(parking="always", compute_dtype=dtype)
    if strategy == "layerwise":
        layerwise_offloadable(component, ["layers"])
        if when == "at a use":
            component.configure_layerwise_offload(config, device=fake_device.device)
            component.park_non_layer_weights()
            fake_device.clear_transfers()
    manager = ComponentResidencyManager(
        {"vae": component}, {"vae": STRATEGIES[strategy]}, config, device=fake_device.device
    )
    with manager.use("vae", target_dtype=None if dtype else torch.bfloat16) as ready:
        assert_same_bits(snapshot(ready), expected)
    assert sum(t.bytes for t in fake_device.transfers if t.kind == "h2d") <= size  # never the float32 weights


def test_the_configuration_is_given_to_offloadable_components(fake_device: FakeDevice) -> None:
    components = {"dit": Denoiser(), "vae": layerwise_offloadable(vae(), [])}
    config = OffloadConfig(parking="always", components={"vae": {"parking": "never"}})
    manager = ComponentResidencyManager(components, config=config, device=fake_device.device)
    for name in components:
        with manager.use(name):
            pass
    assert is_parked(components["dit"].embed.weight)
    assert not is_parked(components["vae"][0].weight)


def test_each_use_reports_what_it_moved(fake_device: FakeDevice, denoiser: Denoiser, tokens: Tensor) -> None:
    denoiser.configure_layerwise_offload(ALWAYS, component_name="denoiser")
    manager = ComponentResidencyManager({"denoiser": denoiser}, device=fake_device.device)
    manager.begin_request()
    with manager.use("denoiser") as component:
        component(tokens)
    restored, parked = manager.reports
    assert isinstance(restored, RestoreReport)
    assert isinstance(parked, ParkReport)
    assert parked.bytes_freed > 0
    manager.finish_request()
    manager.begin_request()
    assert manager.reports == []


def test_a_stated_need_parks_idle_neighbours_until_it_fits(fake_device: FakeDevice, tokens: Tensor) -> None:
    idle = Denoiser().requires_grad_(False)
    idle.configure_layerwise_offload(MEMORY, device=fake_device.device, component_name="idle")
    manager = ComponentResidencyManager({"idle": idle, "vae": vae()}, device=fake_device.device)
    with manager.use("vae"):
        pass
    assert not is_parked(idle.embed.weight)  # there was room
    need = fake_device.free + fake_device.reserved - fake_device.allocated + 1
    fake_device.set_cap(fake_device.memory - 1)
    with manager.use("vae", memory_need=need - 2):
        pass
    assert not is_parked(idle.embed.weight)
    with manager.use("vae", memory_need=need):
        assert is_parked(idle.embed.weight)
    with manager.use("idle") as component:
        component(tokens)


@pytest.mark.parametrize("preferred", [False, True])
def test_a_preferred_component_is_ready_after_the_request(
    fake_device: FakeDevice, denoiser: Denoiser, tokens: Tensor, preferred: bool
) -> None:
    denoiser.configure_layerwise_offload(OffloadConfig(parking="always", resident_layers=2))
    manager = ComponentResidencyManager({"denoiser": denoiser}, device=fake_device.device)
    with manager.use("denoiser", preferred=preferred) as component:
        component(tokens)
    manager.finish_request()
    assert is_parked(denoiser.embed.weight) is not preferred
    with manager.use("denoiser") as component:
        component(tokens)


def test_a_whole_component_can_wait_on_the_host(fake_device: FakeDevice) -> None:
    component = vae()
    values, rows = snapshot(component), torch.ones(2, 64, device=fake_device.device)
    strategies = {"vae": ComponentOffloadStrategy()}
    manager = ComponentResidencyManager({"vae": component}, strategies, device=fake_device.device)
    outputs = []
    for _ in range(2):
        with manager.use("vae") as ready:
            outputs.append(ready(rows).cpu())
        assert fake_device.requested == rows.nbytes
    assert torch.equal(*outputs)
    assert_same_bits(snapshot(component), values)


def two(device: FakeDevice) -> tuple[ComponentResidencyManager, nn.Module, nn.Module]:
    """A manager of a text encoder and a VAE that are parked now."""
    components = {name: layerwise_offloadable(vae(), []) for name in ("text_encoder", "vae")}
    manager = ComponentResidencyManager(components, config=ALWAYS, device=device.device)
    for name in components:
        with manager.use(name):
            pass
    return manager, *components.values()


def test_the_next_component_of_a_declared_order_is_made_ready(fake_device: FakeDevice) -> None:
    manager, text_encoder, decoder = two(fake_device)
    manager.begin_request(["text_encoder", "vae", "text_encoder", "vae"])
    with manager.use("text_encoder"):
        assert is_parked(decoder[0].weight)
    assert not is_parked(decoder[0].weight)
    assert is_parked(text_encoder[0].weight)
    with manager.use("vae"):
        pass
    assert not is_parked(text_encoder[0].weight)
    manager.finish_request()  # it was not used after all
    assert is_parked(text_encoder[0].weight)
    with manager.use("text_encoder"):
        pass
    assert is_parked(decoder[0].weight)  # the order was that of the last request


def test_a_use_that_the_order_does_not_foresee_makes_nothing_ready(fake_device: FakeDevice) -> None:
    manager, text_encoder, decoder = two(fake_device)
    manager.begin_request(["text_encoder", "vae", "text_encoder"])
    with manager.use("vae"):  # the first stage was left out
        pass
    assert (is_parked(text_encoder[0].weight), is_parked(decoder[0].weight)) == (False, True)
    manager.begin_request(["vae"])
    with manager.use("text_encoder"):
        pass
    assert is_parked(decoder[0].weight)
    with pytest.raises(ParkError, match="no component 'dit'"):
        manager.begin_request(["vae", "dit"])
    with pytest.raises(ParkError, match="no component 'dit'"):
        manager.prefetch("dit")


def test_no_room_for_the_next_component_is_not_an_error(fake_device: FakeDevice) -> None:
    manager, _, decoder = two(fake_device)
    manager.begin_request(["text_encoder", "vae"])
    with manager.use("text_encoder"):
        fake_device.fail_device_copy()
    assert is_parked(decoder[0].weight)
    with manager.use("vae"):
        assert not is_parked(decoder[0].weight)


def test_a_stage_that_fails_makes_nothing_ready(fake_device: FakeDevice) -> None:
    manager, text_encoder, decoder = two(fake_device)
    manager.begin_request(["text_encoder", "vae"])
    with pytest.raises(ValueError, match="stage"), manager.use("text_encoder"):
        raise ValueError("the stage failed")
    assert is_parked(text_encoder[0].weight)
    assert is_parked(decoder[0].weight)


def test_a_component_that_cannot_be_finished_does_not_keep_the_others(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, _, decoder = two(fake_device)
    manager.begin_request()
    with manager.use("text_encoder"), manager.use("vae"):
        pass
    manager.prefetch("vae")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cannot be finished")

    monkeypatch.setattr(manager.strategies["text_encoder"], "finish_request", fail)
    with pytest.raises(RuntimeError, match="cannot be finished"):
        manager.finish_request()
    assert is_parked(decoder[0].weight)


def test_a_use_inside_a_use_changes_nothing(fake_device: FakeDevice, denoiser: Denoiser, tokens: Tensor) -> None:
    denoiser.configure_layerwise_offload(ALWAYS)
    manager = ComponentResidencyManager({"denoiser": denoiser}, device=fake_device.device)
    with manager.use("denoiser"):
        with manager.use("denoiser") as component:
            component(tokens)
        component(tokens)
    assert len(manager.reports) == 2


@pytest.mark.parametrize("managers", [1, 2])
def test_coroutines_use_a_component_by_turns(
    fake_device: FakeDevice, denoiser: Denoiser, tokens: Tensor, managers: int
) -> None:
    denoiser.configure_layerwise_offload(ALWAYS)
    first, *_, last = made = [
        ComponentResidencyManager({"denoiser": denoiser}, device=fake_device.device) for _ in range(managers)
    ] * 2
    expected, seen = denoiser(tokens), []

    async def use(manager: ComponentResidencyManager, begin: int, steps: int) -> None:
        for _ in range(begin):
            await asyncio.sleep(0)
        with manager.use("denoiser") as component:
            for _ in range(steps):
                seen.append(torch.equal(component(tokens), expected))
                await asyncio.sleep(0)
        manager.finish_request()

    async def both() -> None:
        await asyncio.gather(use(first, 0, 3), use(last, 1, 5))

    asyncio.run(both())
    assert seen == [True] * 8
    assert is_parked(denoiser.norm.weight)
    assert sum(isinstance(report, RestoreReport) for manager in {*made} for report in manager.reports) == 1


def test_another_thread_waits_for_the_end_of_a_use(fake_device: FakeDevice, denoiser: Denoiser, tokens: Tensor) -> None:
    denoiser.configure_layerwise_offload(ALWAYS)
    manager = ComponentResidencyManager({"denoiser": denoiser}, device=fake_device.device)
    order: list[str] = []
    started = threading.Event()

    def other() -> None:
        started.set()
        with manager.use("denoiser") as component:
            order.append("other")
            component(tokens)

    thread = threading.Thread(target=other)
    with manager.use("denoiser") as component:
        thread.start()
        started.wait()
        component(tokens)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
