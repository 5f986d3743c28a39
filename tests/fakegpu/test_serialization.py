"""Tensors and modules on the device can be copied, pickled, saved and loaded, to there and from there."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_park.fakegpu import FakeDevice


@pytest.fixture
def tensor(fake_device: FakeDevice) -> torch.Tensor:
    return torch.arange(6.0, device=fake_device.device)


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor)), lambda tensor: torch.load(saved(tensor))],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: t.view(2, 3).t(),
        lambda t: t[1:4],
        lambda t: nn.Parameter(t),
        lambda t: t.to(torch.bfloat16),
        lambda t: t > 2,
        lambda t: t.to(torch.complex64),
        lambda t: t[:0],
    ],
    ids=["plain", "transposed", "slice", "parameter", "bfloat16", "bool", "complex", "empty"],
)
def test_a_copy_is_equal_and_independent(tensor: torch.Tensor, make: Any, copied: Any) -> None:
    original = make(tensor)
    copy_ = copied(original)
    assert type(copy_) is type(original)
    assert copy_.device == original.device
    assert copy_.dtype is original.dtype
    assert copy_.stride() == original.stride()
    assert copy_.requires_grad == original.requires_grad
    assert torch.equal(copy_.cpu(), original.cpu())
    if original.numel():
        assert copy_.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
        with torch.no_grad():
            copy_.zero_()
        assert original.cpu().any()


def test_a_module_is_copied_with_buffers_and_ties(fake_device: FakeDevice) -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)).to("fakegpu")
    module[1].weight = module[0].weight
    before = fake_device.requested
    twin = copy.deepcopy(module)
    assert fake_device.requested == 2 * before
    assert twin[1].weight is twin[0].weight
    twin[2].running_mean.add_(1)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert module[2].running_mean.tolist() == [0, 0, 0]
    assert module[0].weight.abs().sum() > 0
    assert {t.device for t in (*twin.parameters(), *twin.buffers())} == {fake_device.device}


def test_loading_follows_map_location(fake_device: FakeDevice, tensor: torch.Tensor) -> None:
    state = {"weight": nn.Parameter(tensor), "view": tensor[2:4]}
    there = torch.load(saved(state))
    assert there["weight"].device == fake_device.device
    assert isinstance(there["weight"], nn.Parameter)
    assert there["view"].untyped_storage().data_ptr() == there["weight"].untyped_storage().data_ptr()
    for host in ("cpu", torch.device("cpu"), {"fakegpu:0": "cpu"}, lambda storage, location: storage):
        loaded = torch.load(saved(state), map_location=host)
        assert loaded["weight"].device.type == "cpu"
        assert loaded["weight"].tolist() == [0, 1, 2, 3, 4, 5]
    moved = torch.load(saved(torch.arange(3.0)), map_location="fakegpu")
    assert (moved.device, moved.tolist()) == (fake_device.device, [0, 1, 2])
    assert torch.load(saved(tensor), map_location="meta").device.type == "meta"


@pytest.mark.fake_device(count=2)
def test_a_tensor_comes_back_to_the_device_it_was_on(fake_device: FakeDevice) -> None:
    tensor = torch.ones(3, device="fakegpu:1")
    assert torch.load(saved(tensor)).device == torch.device("fakegpu:1")
    assert torch.load(saved(tensor), map_location="fakegpu:0").device == torch.device("fakegpu:0")
    assert torch.load(saved(tensor), map_location={"fakegpu:1": "fakegpu:0"}).device == torch.device("fakegpu:0")
    with pytest.raises(RuntimeError, match="(?i)device"):
        torch.load(saved(tensor), map_location="fakegpu:7")


def test_a_checkpoint_can_be_mapped(fake_device: FakeDevice, tensor: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"weight": tensor}, tmp_path / "checkpoint.pt")
    mapped = torch.load(tmp_path / "checkpoint.pt", mmap=True, map_location="cpu")["weight"]
    assert mapped.tolist() == tensor.tolist()
    assert mapped.to("fakegpu").tolist() == tensor.tolist()


def test_a_state_dict_goes_there_and_back(fake_device: FakeDevice) -> None:
    host, device = nn.Linear(3, 3), nn.Linear(3, 3).to(fake_device.device)
    before = fake_device.requested
    device.load_state_dict(host.state_dict())
    assert fake_device.requested == before
    assert torch.equal(device.weight.cpu(), host.weight)
    assert device.weight.device == fake_device.device
    host.load_state_dict({name: value * 2 for name, value in device.state_dict().items()})
    assert torch.equal(device.weight.cpu() * 2, host.weight)
    device.load_state_dict(host.state_dict(), assign=True)
    assert device.weight.device.type == "cpu"


def test_safetensors_are_saved_from_and_loaded_to_the_device(
    fake_device: FakeDevice, tensor: torch.Tensor, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "weights.safetensors"
    values = {"plain": tensor, "transposed": tensor.view(2, 3).t().contiguous(), "half": tensor.bfloat16()}
    safetensors.save_file(values, path)
    for device in (fake_device.device.index, "cpu"):
        loaded = safetensors.load_file(path, device=device)
        for name, value in values.items():
            assert loaded[name].device.type == ("cpu" if device == "cpu" else "fakegpu")
            assert torch.equal(loaded[name].cpu(), value.cpu())
    assert torch.equal(safetensors.load(safetensors.save(values))["plain"], tensor.cpu())


def test_a_pickled_module_works(fake_device: FakeDevice) -> None:
    layer = nn.Linear(3, 2).to(fake_device.device)
    again = pickle.loads(pickle.dumps(layer))
    input = torch.ones(1, 3, device=fake_device.device)
    assert torch.equal(again(input).cpu(), layer(input).cpu())
