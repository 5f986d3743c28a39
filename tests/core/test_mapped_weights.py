"""A weight that is mapped from its checkpoint has the checkpoint as its host copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from conftest import ALWAYS, MEMORY, Denoiser, assert_same_bits, non_layer_weights, snapshot
from park_core import StaleMappingError
from park_core.storage import group_of
from pytest_park.fakegpu import FakeDevice

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "denoiser.safetensors"
    state = Denoiser().state_dict()
    del state["head.weight"]
    safetensors.save_file(state, path)
    return path


def mapped(path: Path) -> Denoiser:
    component = Denoiser().eval().requires_grad_(False)
    component.load_state_dict(safetensors.load_file(path), assign=True, strict=False)
    component.head.weight = component.embed.weight
    return component


def test_a_mapped_weight_needs_no_host_copy_and_no_transfer(fake_device: FakeDevice, checkpoint: Path) -> None:
    component = mapped(checkpoint)
    values = snapshot(component)
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    for _ in range(2):
        assert component.park_non_layer_weights().bytes_to_host == 0
        hosts = {weight._parked.group.host for weight in component.parameters()}
        assert {host.file.path for host in hosts} == {str(checkpoint)}
        assert_same_bits(snapshot(component), values)
        component.restore_non_layer_weights()
    assert_same_bits(snapshot(component), values)


def test_a_mapping_is_kept_even_where_there_is_room(fake_device: FakeDevice, checkpoint: Path) -> None:
    component = mapped(checkpoint)
    component.configure_layerwise_offload(MEMORY, device=fake_device.device)
    assert component.park_non_layer_weights().decision.verdict == "keep"
    group = group_of(component.embed.weight.untyped_storage())
    assert group is not None
    assert group.host is not None
    assert group.host.file is not None


def test_a_weight_that_was_changed_leaves_its_mapping(fake_device: FakeDevice, checkpoint: Path) -> None:
    component = mapped(checkpoint)
    before = checkpoint.read_bytes()
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    component.scale.data.fill_(3)
    assert component.park_non_layer_weights().bytes_to_host == 4
    component.norm.weight.data.fill_(2)  # the host copy, which is the mapping: the file is not written
    component.restore_non_layer_weights()
    assert component.scale.item() == 3
    assert (component.norm.weight == 2).all()
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("what", ["changed", "vanished"])
def test_a_file_that_is_not_what_it_was_is_an_error_by_name(
    fake_device: FakeDevice, checkpoint: Path, what: str
) -> None:
    component = mapped(checkpoint)
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    component.park_non_layer_weights()
    idle = fake_device.requested
    if what == "changed":
        os.utime(checkpoint, ns=(0, 0))
    else:
        checkpoint.unlink()
    with pytest.raises(StaleMappingError, match=rf"scale.*denoiser\.safetensors, which {what}"):
        component.restore_non_layer_weights()
    assert fake_device.requested == idle


def test_an_update_reaches_parked_released_and_resident_weights(fake_device: FakeDevice, checkpoint: Path) -> None:
    component = mapped(checkpoint)
    component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
    component.park_non_layer_weights()
    for turn, action in enumerate((lambda: None, component.restore_non_layer_weights)):
        action()
        update = {name: weight.cpu() + turn + 1 for name, weight in component.iter_materialized_weights()}
        component.update_cpu_weights(update)
        component.restore_non_layer_weights()
        component(torch.arange(3, device=fake_device.device))
        component.park_non_layer_weights()
        after = dict(component.iter_materialized_weights())
        assert all(torch.equal(after[name].cpu(), value) for name, value in update.items())
    assert non_layer_weights(component)


def test_an_update_that_does_not_fit_changes_nothing(denoiser: Denoiser) -> None:
    from park_core import ParkError

    values = snapshot(denoiser)
    for wrong, says in (("norm.bias", r"shape \(3,\)"), ("norm.scale", "no weight 'norm.scale'")):
        with pytest.raises(ParkError, match=says):
            denoiser.update_cpu_weights({"scale": torch.zeros(()), wrong: torch.zeros(3)})
    assert_same_bits(snapshot(denoiser), values)
