"""What counts as held on the host: bytes that are really there, each once."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_park.contract.host import HostLedger, swift_collector
from pytest_park.fakegpu import FakeDevice


def test_a_storage_counts_once_however_many_views_there_are(fake_device: FakeDevice) -> None:
    host = HostLedger()
    with swift_collector():
        before = host.bytes(), host.pinned()
        copy = torch.ones(1000)
        views = [copy[:10], copy.untyped_storage()]
        assert host.bytes() - before[0] == 4000
        pinned = torch.ones(100).pin_memory()
        assert (host.bytes() - before[0], host.pinned() - before[1]) == (4400, 400)
        del copy, views, pinned
        assert (host.bytes(), host.pinned()) == before


def test_what_is_on_the_device_is_not_on_the_host(fake_device: FakeDevice) -> None:
    host = HostLedger()
    with swift_collector():
        before = host.bytes()
        weight = torch.ones(1000, device=fake_device.device)
        assert host.bytes() == before
        assert weight.sum() == 1000


@pytest.mark.parametrize("kind", ["fake", "functional"])
def test_a_tensor_without_data_holds_nothing(fake_device: FakeDevice, kind: str) -> None:
    """torch.compile keeps such tensors for whatever it has compiled in the process."""
    host = HostLedger()
    with swift_collector():
        base = torch.ones(1000)
        before = host.bytes()
        with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
            hollow = torch.empty(1000) if kind == "fake" else torch._to_functional_tensor(base)
        assert (host.bytes(), host.pinned()) == (before, 0)
        assert hollow.numel() == 1000
