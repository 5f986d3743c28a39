"""Every class of the zoo makes the round trip with automatic lists of layers, bit for bit and byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from park_core import OffloadConfig, ParkReport, WeightsParkedError, layerwise_offloadable
from park_core.component import OffloadedComponent, offload_of
from pytest_park.contract.snapshot import bits_of
from pytest_park.fakegpu import FakeDevice

from .zoo import NAMES, build, inputs

ALWAYS = OffloadConfig(parking="always")


def output(module: nn.Module, given: dict[str, Any]) -> list[bytes]:
    """The bits of every tensor that a forward returns."""
    with torch.no_grad():
        return [bits_of(leaf) for leaf in tree_leaves(module(**given)) if isinstance(leaf, Tensor)]


def values(module: nn.Module) -> dict[str, bytes]:
    return {name: bits_of(tensor) for name, tensor in module.state_dict().items()}


def device_bytes(module: nn.Module) -> int:
    """Bytes on the device of everything that a module has, plain attributes included, each storage once."""
    tensors: list[Any] = [
        *module.parameters(),
        *module.buffers(),
        *(v for m in module.modules() for v in vars(m).values()),
    ]
    storages = {t.untyped_storage() for t in tensors if isinstance(t, Tensor) and t.device.type != "cpu"}
    return sum(storage.nbytes() for storage in storages)


def offloaded(module: nn.Module, device: FakeDevice) -> OffloadedComponent:
    offload = offload_of(layerwise_offloadable(module, None, config=ALWAYS, device=device.device))
    assert offload is not None
    return offload


def park(offload: OffloadedComponent) -> ParkReport:
    offload.release_layers()
    return offload.parking.park()


@pytest.mark.fake_device(leaks="allow")  # some classes keep tables on the device in functions with a cache
@pytest.mark.parametrize("name", NAMES)
def test_it_comes_back_bit_for_bit_and_every_byte_is_accounted_for(fake_device: FakeDevice, name: str) -> None:
    module = build(name)
    given, outside = inputs(name, module, fake_device.device), fake_device.requested
    module.to(fake_device.device)
    assert fake_device.requested - outside == device_bytes(module)
    expected, then, everything = output(module, given), values(module), device_bytes(module)
    assert expected
    outside = fake_device.requested - everything  # and the tables that functions of the libraries have cached

    offload = offloaded(module, fake_device)
    for _ in range(2):
        before = fake_device.requested
        report = park(offload)
        streamed = everything - (before - outside)
        stays = sum(skipped.bytes for skipped in report.skipped)
        assert report.bytes_freed == before - fake_device.requested
        assert report.bytes_freed + streamed + stays == everything, str(report)
        assert fake_device.requested - outside == stays, str(report)
        assert values(module) == then
        with pytest.raises(WeightsParkedError):
            module(**given)
        assert offload.parking.restore().bytes_restored == report.bytes_freed
        assert output(module, given) == expected
        offload.release_layers()


@pytest.mark.parametrize(
    "name",
    ["FluxTransformer2DModel", "AutoencoderKL", "ControlNetModel", "T5EncoderModel", "CLIPModel", "GPT2LMHeadModel"],
)
def test_saving_while_parked_writes_the_real_weights(fake_device: FakeDevice, name: str, tmp_path: Any) -> None:
    module = build(name)
    then = values(module)
    offload = offloaded(module.to(fake_device.device), fake_device)
    park(offload)
    module.save_pretrained(tmp_path)
    assert values(type(module).from_pretrained(tmp_path)) == then
    offload.parking.restore()
    assert values(module) == then


def test_weights_that_require_gradients_are_parked_although_layers_are_loaded(fake_device: FakeDevice) -> None:
    module = build("BertModel").to(fake_device.device)
    offload = offloaded(module, fake_device)
    for manager in offload.managers:
        manager.load_all_layers()
    report = offload.parking.park()
    assert report.decision.verdict == "park", report.decision.reason
