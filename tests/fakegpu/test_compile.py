"""``torch.compile(backend="eager")``, FX and functional transforms trace what runs on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from pytest_park.fakegpu import FakeDevice

#: torch's own, on Python 3.13.0 alone.
pytestmark = pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def module(fake_device: FakeDevice) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(fake_device.device)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_equals_itself(fake_device: FakeDevice, module: nn.Module, backend: str) -> None:
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    input = torch.randn(3, 4, device=fake_device.device, requires_grad=True)
    output = compiled(input)
    torch.testing.assert_close(output, module(input))
    (gradient,) = torch.autograd.grad(output.sum(), input)
    (expected,) = torch.autograd.grad(module(input).sum(), input)
    torch.testing.assert_close(gradient, expected)
    assert gradient.device == fake_device.device


def test_a_compiled_function_makes_tensors_on_the_device(fake_device: FakeDevice) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def made(count: int) -> torch.Tensor:
        return torch.arange(count, device="fakegpu") * 2 + torch.ones(count, device="fakegpu")

    assert made(3).tolist() == [1, 3, 5]
    assert made(3).device == fake_device.device


def test_a_graph_can_be_traced(fake_device: FakeDevice, module: nn.Module) -> None:
    traced = torch.fx.symbolic_trace(module)
    input = torch.randn(3, 4, device=fake_device.device)
    torch.testing.assert_close(traced(input), module(input))


def test_functional_transforms_work(fake_device: FakeDevice, module: nn.Module) -> None:
    input = torch.randn(3, 4, device=fake_device.device)
    torch.testing.assert_close(torch.func.vmap(module)(input), module(input))
    gradient = torch.func.grad(lambda x: module(x).sum())(input)
    leaf = input.clone().requires_grad_()
    module(leaf).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)
    _, tangent = torch.func.jvp(module, (input,), (torch.ones_like(input),))
    assert tangent.device == fake_device.device
    host = module.to("cpu")
    torch.testing.assert_close(tangent.cpu(), torch.func.jvp(host, (input.cpu(),), (torch.ones(3, 4),))[1])


def attention(query: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, query.new_ones(3, 3).tril().bool())


_TRANSFORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "compiled": torch.compile(attention, backend="eager", fullgraph=True),
    "compiled with its backward": torch.compile(attention, backend="aot_eager", fullgraph=True),
    "traced": lambda x: torch.fx.experimental.proxy_tensor.make_fx(attention, tracing_mode="symbolic")(x)(x),
    "batched": lambda x: torch.func.vmap(attention)(x),
    "differentiated": lambda x: torch.func.vjp(attention, x)[0],
    "batched and differentiated": lambda x: torch.func.vjp(torch.func.vmap(attention), x)[0],
}


@pytest.mark.parametrize("transformed", _TRANSFORMS.values(), ids=_TRANSFORMS)
def test_attention_can_be_transformed(
    fake_device: FakeDevice, transformed: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    given = torch.randn(2, 2, 3, 4, device=fake_device.device)
    torch.testing.assert_close(transformed(given), attention(given))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_attention_takes_the_fused_kernel(fake_device: FakeDevice, backend: str) -> None:
    given = torch.randn(1, 1, 1024, 4, device=fake_device.device)
    compiled = torch.compile(
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), backend=backend, fullgraph=True
    )
    compiled(given)
    before = fake_device.allocated
    fake_device.reset_peak()
    compiled(given)
    assert fake_device.peak_allocated - before < 1024 * 1024 * 4  # the matrix of all queries with all keys


def test_modes_see_the_operators(fake_device: FakeDevice, module: nn.Module) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    input = torch.randn(3, 4, device=fake_device.device)
    with FlopCounterMode(display=False) as counter:
        module(input)
    assert counter.get_total_flops() == 2 * 3 * (4 * 8 + 8 * 2)
