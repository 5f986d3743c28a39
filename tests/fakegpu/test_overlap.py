"""What is written may not overlap with what is read: refused as on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_park.fakegpu import FakeDevice


def given(device: Any) -> Tensor:
    return torch.arange(4.0, device=device)


_OVERLAP: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x[1:].add_(x[:-1]),
    "in place, by name": lambda x: x[1:].add_(x[:-1], alpha=2),
    "in place, third argument": lambda x: x[1:].addcmul_(torch.ones_like(x[1:]), x[:-1]),
    "in lists": lambda x: torch._foreach_add_([x[1:]], [x[:-1]]),
    "in a copy": lambda x: x[1:].copy_(x[:-1]),
    "in out=": lambda x: torch.add(x[1:], 1, out=x[:-1]),
    "in out= that is an argument": lambda x: torch.take(x, torch.tensor([0, 1, 1, 0], device=x.device), out=x),
    "by indices": lambda x: x.index_put_((torch.tensor([0, 1], device=x.device),), x[2:]),
}
_NONE: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x.add_(x),
    "a view of all of it": lambda x: x.view(2, 2).mul_(x.view(2, 2)),
    "the other half": lambda x: x[2:].add_(x[:2]),
    "every other element": lambda x: x[::2].add_(x[1::2]),
    "itself as out=": lambda x: torch.add(x, 1, out=x),
    "a copy of itself": lambda x: x.copy_(x.view(4)),
}


@pytest.mark.parametrize("write", list(_OVERLAP.values()), ids=list(_OVERLAP))
def test_a_write_into_what_is_read_is_refused(fake_device: FakeDevice, write: Callable[[Tensor], Any]) -> None:
    for device in ("cpu", fake_device.device):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            write(given(device))


@pytest.mark.parametrize("write", list(_NONE.values()), ids=list(_NONE))
def test_a_write_beside_what_is_read_is_not(fake_device: FakeDevice, write: Callable[[Tensor], Any]) -> None:
    host, device = given("cpu"), given(fake_device.device)
    assert write(device).tolist() == write(host).tolist()
    assert device.tolist() == host.tolist()
