"""Thirty classes of diffusers and transformers make the round trip with automatic lists of layers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from conftest import ALWAYS, assert_same_bits, bits, snapshot
from park_core import ParkReport, WeightsParkedError, layerwise_offloadable
from park_core.component import offload_of
from pytest_park.fakegpu import FakeDevice

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from zoo import ZOO


@pytest.fixture(params=ZOO)
def name(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def module(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name][0]().eval().requires_grad_(False)


@pytest.fixture
def inputs(name: str, fake_device: FakeDevice) -> dict[str, Any]:
    return tree_map_only(Tensor, lambda tensor: tensor.to(fake_device.device), dict(ZOO[name][1]()))  # type: ignore[no-any-return]


def output(module: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Every tensor that a forward returns, on the host."""
    return [leaf.cpu() for leaf in tree_leaves(module(**inputs)) if isinstance(leaf, Tensor)]


def storage_bytes(module: nn.Module, under: str = "") -> int:
    """Bytes of everything that a module owns, each storage once."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    storages = {tensor.untyped_storage() for name, tensor in tensors if name.startswith(under)}
    return sum(storage.nbytes() for storage in storages)


def park(module: nn.Module) -> ParkReport:
    offload = offload_of(module)
    assert offload is not None
    offload.release_layers()
    return offload.park()


def test_it_comes_back_bit_for_bit_and_every_byte_is_accounted_for(
    fake_device: FakeDevice, module: nn.Module, inputs: dict[str, Any]
) -> None:
    outside = fake_device.requested
    expected = output(module.to(fake_device.device), inputs)
    assert expected
    values, everything = snapshot(module), fake_device.requested - outside
    assert everything == storage_bytes(module)

    layerwise_offloadable(module, None, config=ALWAYS, device=fake_device.device)
    for _ in range(2):
        before = fake_device.requested
        report = park(module)
        streamed = everything - (before - outside)
        stays = sum(skipped.bytes for skipped in report.skipped)
        assert report.bytes_freed == before - fake_device.requested
        assert report.bytes_freed + streamed + stays == everything, str(report)
        assert fake_device.requested - outside == stays, str(report)
        assert_same_bits(snapshot(module), values)
        with pytest.raises(WeightsParkedError):
            module(**inputs)
        restored = module.restore_non_layer_weights()
        assert restored.bytes_restored == report.bytes_freed
        actual = output(module, inputs)
        assert all(torch.equal(bits(a), bits(e)) for a, e in zip(actual, expected, strict=True))
        offload_of(module).release_layers()


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "AutoencoderKL", "T5EncoderModel"])
def test_saving_while_parked_writes_the_real_weights(fake_device: FakeDevice, module: nn.Module, tmp_path: Any) -> None:
    values = snapshot(module)
    layerwise_offloadable(module, None, config=ALWAYS, device=fake_device.device)
    park(module)
    module.save_pretrained(tmp_path)
    assert_same_bits(snapshot(type(module).from_pretrained(tmp_path)), values)
    module.restore_non_layer_weights()
    assert_same_bits(snapshot(module), values)
