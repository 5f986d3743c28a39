"""Wrong input gets a named error before anything is touched, and everything is usable afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from conftest import ALWAYS, Denoiser, assert_same_bits, snapshot
from park_core import (
    ComponentResidencyManager,
    LayerNameError,
    OffloadConfig,
    ParkError,
    WeightsParkedError,
    device_headroom,
    layerwise_offloadable,
)
from pytest_park.fakegpu import FakeDevice


@pytest.mark.parametrize(
    ("name", "says"),
    [("layers", "does not exist"), ("norm", "is a LayerNorm"), ("", "is a Denoiser"), ("embed.weight", "not exist")],
)
def test_a_wrong_layer_name_is_refused_by_name(fake_device: FakeDevice, name: str, says: str) -> None:
    component = Denoiser()
    component.layer_names = ("blocks", name)
    with pytest.raises(LayerNameError, match=rf"'{name}' .*{says}.*\['blocks'\]"):
        component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    assert {weight.device.type for weight in component.parameters()} == {"cpu"}
    component.layer_names = ("blocks",)
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    component(torch.arange(3, device=fake_device.device))


def test_a_wrong_layer_name_is_refused_before_it_is_used() -> None:
    component = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(LayerNameError, match=r"'layers' does not exist in Sequential; .*\['0'\]"):
        layerwise_offloadable(component, ["layers"])
    assert not hasattr(component, "park_non_layer_weights")


@pytest.mark.parametrize("names", [("0", "0"), ("0", "0.1"), ("0.1", "1", "0")])
def test_layers_that_two_names_lead_to_are_refused(fake_device: FakeDevice, names: tuple[str, ...]) -> None:
    component = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))) for _ in range(2)))
    with pytest.raises(LayerNameError, match=r"'0(\.1)?' and '0(\.1)?' lead to the same layers"):
        layerwise_offloadable(component, names, device=fake_device.device)
    assert fake_device.requested == 0


def test_the_host_is_no_device() -> None:
    with pytest.raises(ValueError, match=r"host_headroom\(\)"):
        device_headroom("cpu")


def test_a_component_that_runs_on_the_host_is_refused() -> None:
    component = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ParkError, match=r"'encoder' is to run on the host"):
        layerwise_offloadable(component, [], device="cpu", component_name="encoder")
    assert torch.equal(component(torch.zeros(1, 2)), component[0].bias.view(1, 2))


def test_a_meta_parameter_is_refused_by_name(fake_device: FakeDevice) -> None:
    component = Denoiser()
    component.norm.to("meta")
    with pytest.raises(ParkError, match=r"'norm\.weight' is a meta tensor"):
        component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    assert fake_device.requested == 0


def test_methods_before_configuration_say_what_to_call() -> None:
    component = layerwise_offloadable(nn.Sequential(nn.Linear(2, 2)), [])
    for verb in (component.park_non_layer_weights, component.restore_non_layer_weights, component.prepare_for_next_req):
        with pytest.raises(ParkError, match="call configure_layerwise_offload"):
            verb()


@pytest.mark.parametrize("size", ["12 gigs", "12 GB", "-1 GiB", -1, True])
def test_a_size_that_is_none_is_refused(denoiser: Denoiser, size: object) -> None:
    with pytest.raises(ValueError, match='"12 GiB"'):
        denoiser.park_non_layer_weights(need=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"parking": "sometimes"}, "auto, always, never"),
        ({"performance_mode": "turbo"}, "'turbo' is none of auto, speed, memory, manual"),
        ({"significance": -0.1}, "significance"),
        ({"significance": math.nan}, "significance"),
        ({"prefetch": math.nan}, "fraction"),
        ({"components": {"vae": {"resident_layers": -1}}}, "count"),
        ({"resident_layers": 1.5}, "fraction"),
        ({"prefetch": -1}, "count"),
        ({"residency_policy": "random"}, "leading, strided"),
        ({"compute_dtype": torch.int8}, "compute_dtype"),
        ({"pin_memory": "lots"}, "pin_memory .* .lots. is not a size"),
        ({"components": {"vae": {"residents": 3}}}, "residents"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OffloadConfig(**settings)  # type: ignore[arg-type]


def test_a_component_used_while_parked_says_what_to_do(denoiser: Denoiser, tokens: Tensor) -> None:
    expected = denoiser(tokens)
    denoiser.park_non_layer_weights(need=1 << 50)
    with pytest.raises(WeightsParkedError) as caught:
        denoiser(tokens)
    assert caught.value.component == "denoiser"
    assert caught.value.parameter == "scale"
    assert caught.value.remedy == "restore_non_layer_weights()"
    denoiser.restore_non_layer_weights()
    assert torch.equal(denoiser(tokens), expected)


class StageError(Exception):
    """What a stage of somebody's pipeline raises."""


@pytest.mark.parametrize("where", ["before the component", "inside a layer", "out of memory"])
def test_a_stage_that_fails_leaves_the_component_and_the_device_usable(
    fake_device: FakeDevice, denoiser: Denoiser, tokens: Tensor, where: str
) -> None:
    expected, values = denoiser(tokens), snapshot(denoiser)
    denoiser.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    manager = ComponentResidencyManager({"denoiser": denoiser}, device=fake_device.device)
    with manager.use("denoiser"):
        pass
    idle = fake_device.requested
    error = torch.OutOfMemoryError if where == "out of memory" else StageError

    def fail(*_: object) -> None:
        raise StageError("in the middle")

    hook = denoiser.blocks[2].register_forward_hook(fail) if where == "inside a layer" else None
    with pytest.raises(error), manager.use("denoiser") as component:  # noqa: PT012
        if where == "before the component":
            fail()
        if where == "out of memory":
            fake_device.fail_allocation()
        component(tokens)
    assert fake_device.requested == idle
    if hook is not None:
        hook.remove()
    with manager.use("denoiser") as component:
        assert torch.equal(component(tokens), expected)
    manager.finish_request()
    assert fake_device.requested == idle
    assert_same_bits(snapshot(denoiser), values)


def test_an_unknown_component_is_refused_by_name(denoiser: Denoiser, fake_device: FakeDevice) -> None:
    manager = ComponentResidencyManager({"denoiser": denoiser}, device=fake_device.device)
    with pytest.raises(ParkError, match=r"'vae'.*\['denoiser'\]"), manager.use("vae"):
        pass
    with pytest.raises(ParkError, match=r"\['vae'\].*\['denoiser'\]"):
        ComponentResidencyManager({"denoiser": denoiser}, {"vae": object()}, device=fake_device.device)  # type: ignore[dict-item]
