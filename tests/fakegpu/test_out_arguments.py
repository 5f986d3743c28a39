"""``out=``: written where it lies, resized where it must be, refused on another device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_park.fakegpu import FakeDevice

_OF_TWO: dict[str, Callable[[Tensor, Any], Any]] = {
    "sort": lambda x, out: torch.sort(x, out=out),
    "topk": lambda x, out: torch.topk(x, 6, out=out),
    "cummax": lambda x, out: torch.cummax(x, 0, out=out),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("call", _OF_TWO.values(), ids=_OF_TWO)
@pytest.mark.parametrize("which", [0, 1])
def test_one_that_must_grow_leaves_the_other_its_result(
    fake_device: FakeDevice, call: Callable[[Tensor, Any], Any], which: int
) -> None:
    given = torch.tensor([3.0, 1.0, 5.0, 0.0, 4.0, 2.0])
    results = []
    for device in ("cpu", fake_device.device):
        out = [torch.full((12,), 7.0, device=device)[::2], torch.full((12,), 7, device=device)[::2]]
        out[which] = out[which][:3]
        call(given.to(device), tuple(out))
        results.append([tensor.cpu() for tensor in out])
    assert all(torch.equal(actual, expected) for actual, expected in zip(*reversed(results), strict=True))


def test_an_empty_part_of_a_buffer_is_filled_in_the_buffer(fake_device: FakeDevice) -> None:
    buffer = torch.zeros(8, device=fake_device.device)
    allocated = fake_device.allocated
    out = torch.add(torch.ones(3, device=fake_device.device), 1, out=buffer[2:2])
    assert buffer.tolist() == [0, 0, 2, 2, 2, 0, 0, 0]
    assert out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert fake_device.allocated == allocated
