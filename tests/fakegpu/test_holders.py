"""What keeps device memory alive has a name."""

from __future__ import annotations

import torch
from torch import nn

from pytest_park.fakegpu import FakeDevice


def test_a_local_variable_is_named_with_its_function(fake_device: FakeDevice) -> None:
    activations = torch.ones(256, device="fakegpu")
    (holder,) = fake_device.holders()
    assert holder.bytes == activations.nbytes
    assert holder.names == ("'activations' of test_a_local_variable_is_named_with_its_function()",)


def test_parameters_and_buffers_are_named_with_their_module(fake_device: FakeDevice) -> None:
    norm = nn.BatchNorm1d(64, device="fakegpu", track_running_stats=True)
    names = [name for holder in fake_device.holders() for name in holder.names]
    assert "BatchNorm1d._parameters['weight'] (Parameter(64,))" in names
    assert "BatchNorm1d._buffers['running_mean'] (Tensor(64,))" in names
    assert norm.num_features == 64


def test_a_view_holds_the_whole_storage(fake_device: FakeDevice) -> None:
    corner = torch.ones(64, 64, device="fakegpu")[:1, :1]
    (holder,) = fake_device.holders()
    assert holder.bytes == 64 * 64 * 4
    assert holder.names == ("'corner' of test_a_view_holds_the_whole_storage()",)
    assert corner.shape == (1, 1)


def test_dicts_and_lists_are_named_by_kind(fake_device: FakeDevice) -> None:
    cache = {"keys": torch.ones(4, device="fakegpu")}
    several = [torch.ones(8, device="fakegpu")]
    names = {holder.bytes: str(holder) for holder in fake_device.holders()}
    assert "a dict['keys'] (Tensor(4,))" in names[16]
    assert "a list (Tensor(8,))" in names[32]
    assert len(cache) == len(several) == 1


def test_looking_keeps_nothing_alive(fake_device: FakeDevice) -> None:
    tensor = torch.ones(256, device="fakegpu")
    found = fake_device.holders()
    del tensor
    assert fake_device.requested == 0
    assert len(found) == 1


def test_what_only_autograd_holds_is_said_to_be_held_by_nobody_with_a_name(fake_device: FakeDevice) -> None:
    weight = torch.ones(16, device="fakegpu", requires_grad=True)
    loss = (weight * 2).exp().sum()
    texts = [str(holder) for holder in fake_device.holders()]
    assert any("nobody that Python can name" in text for text in texts)
    assert loss.requires_grad
