"""Views that torch conjugates or negates only when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_park.fakegpu import FakeDevice

_LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugated": lambda x: x.conj(),
    "negated": lambda x: x.conj().imag,
    "both": lambda x: torch._neg_view(x.conj()),
}
_READ: dict[str, Callable[[Tensor], Any]] = {
    "copied to the host": lambda x: x.cpu(),
    "cloned": lambda x: x.clone().cpu(),
    "converted": lambda x: x.to(torch.complex128).cpu(),
    "in an operator": lambda x: (x * 2).cpu(),
    "an element": lambda x: x[0].item(),
    "copied over": lambda x: torch.zeros_like(x).copy_(x).cpu(),
    "copied over within its memory": lambda x: x[1:].copy_(x[:-1].clone()).cpu(),
}


@pytest.mark.parametrize("lazy", _LAZY.values(), ids=_LAZY)
@pytest.mark.parametrize("read", _READ.values(), ids=_READ)
def test_what_is_read_is_what_it_stands_for(
    fake_device: FakeDevice, lazy: Callable[[Tensor], Tensor], read: Callable[[Tensor], Any]
) -> None:
    given = torch.tensor([1 + 2j, 3 - 4j, -5 + 6j])
    expected, actual = read(lazy(given.clone())), read(lazy(given.to(fake_device.device)))
    assert torch.equal(torch.as_tensor(actual), torch.as_tensor(expected))


@pytest.mark.parametrize("lazy", _LAZY.values(), ids=_LAZY)
def test_what_is_written_through_it_is_read_from_its_base(
    fake_device: FakeDevice, lazy: Callable[[Tensor], Tensor]
) -> None:
    given = torch.tensor([1 + 2j, 3 - 4j])
    there = given.to(fake_device.device)
    for base in (given, there):
        lazy(base).copy_(torch.tensor([7.0, 8.0], device=base.device))
        lazy(base).add_(1)
    assert torch.equal(there.cpu(), given)
