"""A streamed component can be compiled, transformed by ``torch.func`` and differentiated like one that is all there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conftest import ALWAYS, Denoiser, assert_same_bits, snapshot
from park_core import ComponentResidencyManager, WeightsParkedError, layerwise_offloadable
from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import FakeDevice

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # from torch's own use of it


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # of the fake device's kernels
@pytest.mark.parametrize("what", ["the component", "its layers"])
def test_it_is_compiled_once_and_gives_the_same(fake_device: FakeDevice, tokens: Tensor, what: str) -> None:
    import torch._dynamo  # takes seconds

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    component = compiled = Denoiser().eval().requires_grad_(False)
    with fake_device.unwatched():  # the sanitizer would be compiled, too
        component.configure_layerwise_offload(ALWAYS, device=fake_device.device)
        expected = component(tokens)
        if what == "the component":
            compiled = torch.compile(component, backend="eager")
        else:
            for block in component.blocks:
                block.compile(backend="eager")
        graphs = set()
        for _ in range(3):
            assert torch.equal(compiled(tokens), expected)
            graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            component.park_non_layer_weights()
            with pytest.raises(WeightsParkedError):
                compiled(tokens)
            component.restore_non_layer_weights()
        assert len(graphs) == 1
        component.blocks[2].weight.zero_()
        changed = compiled(tokens)
        component.disable_layerwise_offload()
        assert torch.equal(component(tokens), changed)
    assert not torch.equal(changed, expected)
    torch._dynamo.reset()


def test_a_compiled_component_stands_for_the_one_that_was_compiled(fake_device: FakeDevice, tokens: Tensor) -> None:
    component = Denoiser().eval().requires_grad_(False)
    compiled = torch.compile(component, backend="eager")
    layerwise_offloadable(compiled, ["blocks"], config=ALWAYS, device=fake_device.device)
    residency = ComponentResidencyManager({"denoiser": compiled}, device=fake_device.device)
    with residency.use("denoiser") as ready:
        assert ready is compiled
        assert component(tokens).device == fake_device.device
        assert not is_parked(component.norm.weight)
    assert is_parked(component.norm.weight)
    compiled.restore_non_layer_weights()
    assert not is_parked(component.norm.weight)


class Stack(nn.Module):
    """Layers of one kind, the last one frozen or not as the others."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.weight


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "layer norm": lambda: nn.LayerNorm(8),
    "scale": Scale,
    "two linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
}


@pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
def stacks(request: pytest.FixtureRequest, fake_device: FakeDevice) -> tuple[nn.Module, nn.Module, Tensor]:
    """The same twice: streamed, and on the device for good; and rows for them."""
    torch.manual_seed(0)
    stack = Stack(request.param)
    twin = copy.deepcopy(stack).to(fake_device.device)
    layerwise_offloadable(stack, ["layers"], config=ALWAYS, device=fake_device.device)
    return stack, twin, torch.randn(2, 8).to(fake_device.device)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jvp": lambda module, rows: torch.func.jvp(module, (rows,), (rows + 1,))[1],
    "grad": lambda module, rows: torch.func.grad(lambda x: module(x).square().sum())(rows),
    "vmap": lambda module, rows: torch.vmap(module)(rows),
    "jacrev": lambda module, rows: torch.func.jacrev(module)(rows),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_can_be_transformed(stacks: tuple[nn.Module, nn.Module, Tensor], transform: str) -> None:
    stack, twin, rows = stacks
    for _ in range(2):
        assert torch.equal(TRANSFORMS[transform](stack, rows), TRANSFORMS[transform](twin, rows))
    assert_same_bits(snapshot(stack), snapshot(twin))


def test_a_backward_reaches_the_inputs(fake_device: FakeDevice, stacks: tuple[nn.Module, nn.Module, Tensor]) -> None:
    stack, twin, rows = stacks
    before = fake_device.requested
    gradients = []
    for module in (stack, twin):
        leaf = rows.clone().requires_grad_()
        output = module(leaf).square().sum()
        stack.layerwise_offload_managers[0].release_all()
        output.backward()
        gradients.append(leaf.grad)
        del leaf, output
    assert torch.equal(*gradients)
    gradients.clear()
    assert fake_device.requested == before  # what the backward needed went with it
    assert_same_bits(snapshot(stack), snapshot(twin))


def test_a_backward_that_trains_layers_that_are_gone_raises_as_torch_does(
    stacks: tuple[nn.Module, nn.Module, Tensor],
) -> None:
    stack, _, rows = stacks
    stack.requires_grad_(True)
    output = stack(rows)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    stack.layerwise_offload_managers[0].load_all_layers()  # with all of them there it works
    stack(rows).sum().backward()
    assert all(weight.grad is not None for weight in stack.parameters())
