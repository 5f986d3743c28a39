"""What a hook of a backward raises reaches the caller, although it passes through C++ in another thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_park.fakegpu import FakeDevice


class Refused(Exception):
    pass


def refuse(*args: object) -> None:
    raise Refused("by the hook")


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


HOOKS: dict[str, Callable[[Tensor, Tensor, Callable[..., None]], object]] = {
    "of a tensor": lambda leaf, product, hook: product.register_hook(hook),
    "of a leaf": lambda leaf, product, hook: leaf.register_hook(hook),
    "after the gradient is there": lambda leaf, product, hook: leaf.register_post_accumulate_grad_hook(hook),
    "of a node": lambda leaf, product, hook: product.grad_fn.register_hook(hook),
    "before a node": lambda leaf, product, hook: product.grad_fn.register_prehook(hook),
}


@pytest.mark.parametrize("hook", [refuse, interrupt])
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_an_exception_in_a_hook_is_raised_by_backward(
    fake_device: FakeDevice, register: Callable[..., object], hook: Callable[..., None]
) -> None:
    leaf = torch.ones(4, device=fake_device.device, requires_grad=True)
    product = leaf * 2
    register(leaf, product, hook)
    with pytest.raises(Refused if hook is refuse else KeyboardInterrupt) as caught:
        product.sum().backward()
    assert caught.traceback[-1].name == hook.__name__
    again = leaf * 3
    (gradient,) = torch.autograd.grad(again.sum(), again)
    assert gradient.tolist() == [1] * 4


def test_what_torch_itself_finds_wrong_stays_as_it_is(fake_device: FakeDevice) -> None:
    leaf = torch.ones(4, device=fake_device.device, requires_grad=True)
    product = leaf * 2
    product.register_hook(lambda gradient: torch.ones(3, device=fake_device.device))
    with pytest.raises(RuntimeError, match="changed the size"):
        product.sum().backward()
