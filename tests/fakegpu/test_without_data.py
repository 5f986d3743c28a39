"""Devices without data: any size on any host; shapes, dtypes, layouts and bytes as with data; values are refused."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_park.fakegpu import FakeDevice, RaceError, activate
from pytest_park.sizes import GiB, MiB


@pytest.fixture
def empty_device() -> Iterator[FakeDevice]:
    with activate(memory="80 GiB", data=False) as device:
        yield device


def test_a_tensor_larger_than_the_host_occupies_the_device_and_nothing_else(empty_device: FakeDevice) -> None:
    tensor = torch.empty(60 * GiB, dtype=torch.uint8, device="fakegpu")
    assert empty_device.allocated == empty_device.requested == 60 * GiB
    assert tensor.nbytes == 60 * GiB
    assert empty_device.free == 20 * GiB
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 21\.00 GiB"):
        torch.empty(21 * GiB, dtype=torch.uint8, device="fakegpu")
    del tensor
    assert empty_device.allocated == 0


COMPUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x.mT,
    "softmax": lambda x: x.softmax(-1),
    "another dtype": lambda x: x.to(torch.bfloat16),
    "a view": lambda x: x[1:, ::2].t(),
    "a reduction": lambda x: x.sum(0, keepdim=True),
    "in place": lambda x: x.add_(1),
    "concatenation": lambda x: torch.cat([x, x], 1),
    "permuted": lambda x: x.view(4, 8, 8).permute(2, 0, 1) + 1,
    "channels last": lambda x: F.conv2d(
        x.view(1, 4, 8, 8).contiguous(memory_format=torch.channels_last), torch.empty(6, 4, 3, 3, device=x.device)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 4, 8, 8)] * 3),
    "random": lambda x: torch.randn(7, 3, device=x.device),
    "embedding": lambda x: F.embedding(torch.arange(3, device=x.device), x),
}


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_results_have_the_shape_layout_and_bytes_that_they_have_with_data(compute: Callable[[Tensor], Tensor]) -> None:
    found = []
    for data in (True, False):
        with activate(memory="1 GiB", data=data) as device:
            result = compute(torch.ones(4, 64, device="fakegpu"))
            facts = result.shape, result.stride(), result.dtype, result.device, result.is_contiguous()
            found.append((facts, device.allocated, device.requested))
            del result
    assert found[0] == found[1]


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), (1, 3, 16, 16)),
    "LSTM": (lambda: nn.LSTM(4, 4, 2), (2, 3, 4)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32), (5, 2, 16)),
}


@pytest.mark.parametrize(("build", "shape"), MODULES.values(), ids=MODULES)
def test_modules_run_forward_and_backward_with_the_peak_that_they_have_with_data(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    peaks = []
    for data in (True, False):
        with activate(memory="1 GiB", data=data) as device:
            module = build().to("fakegpu").eval()
            device.reset_peak()
            output = module(torch.ones(shape, device="fakegpu"))
            (output[0] if isinstance(output, tuple) else output).sum().backward()
            assert all(parameter.grad is not None for parameter in module.parameters())
            peaks.append(device.peak_allocated)
            module.zero_grad()
            del module, output
    assert peaks[0] == peaks[1]


def test_a_convolution_at_the_size_of_a_video_frame_is_instant(empty_device: FakeDevice) -> None:
    with torch.device("fakegpu"), torch.no_grad():
        frames = nn.Conv3d(96, 96, 3, padding=1)(torch.empty(1, 96, 9, 480, 832))
    assert frames.shape == (1, 96, 9, 480, 832)
    assert empty_device.peak_allocated >= 2 * 4 * math.prod(frames.shape)


# -- copies -----------------------------------------------------------------------------------------------------------


def test_copies_are_logged_and_leave_the_host_as_it_was(empty_device: FakeDevice) -> None:
    host = torch.full((4,), 7.0)
    on_device = host.to("fakegpu")
    host.copy_(on_device)
    assert [(transfer.kind, transfer.bytes) for transfer in empty_device.transfers] == [("h2d", 16), ("d2h", 16)]
    assert host.tolist() == [7] * 4
    assert on_device.cpu().shape == (4,)


# -- what needs values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [Tensor.item, bool, float, lambda tensor: tensor.tolist()],
    ids=["item", "bool", "float", "tolist"],
)
def test_a_look_at_a_value_is_refused(empty_device: FakeDevice, look: Callable[[Tensor], object]) -> None:
    with pytest.raises(NotImplementedError, match="activated with data=False"):
        look(torch.ones((), device="fakegpu"))


def test_a_tensor_is_shown_by_its_shape(empty_device: FakeDevice) -> None:
    assert repr(torch.ones(2, 3, device="fakegpu")) == "tensor(..., device='fakegpu:0', size=(2, 3))"


def test_a_result_whose_shape_depends_on_values_is_refused(empty_device: FakeDevice) -> None:
    with pytest.raises(NotImplementedError):
        torch.ones(4, device="fakegpu").nonzero()


def test_after_it_devices_hold_data_again() -> None:
    with activate(memory="1 GiB", data=False):
        torch.ones(4, device="fakegpu")
    with activate(memory="1 GiB"):
        assert torch.ones(4, device="fakegpu").add(1).tolist() == [2] * 4


# -- faults, streams --------------------------------------------------------------------------------------------------


def test_faults_and_streams_are_there_without_data(empty_device: FakeDevice) -> None:
    empty_device.fail_allocation()
    with pytest.raises(torch.OutOfMemoryError, match="as asked"):
        torch.empty(4, device="fakegpu")
    side = torch.fakegpu.Stream()
    tensor = torch.empty(4, device="fakegpu").fill_(1)
    with side, pytest.raises(RaceError):
        tensor.add_(1)


def test_the_host_needs_next_to_nothing_for_it() -> None:
    program = """
        import resource, torch
        from pytest_park.fakegpu import activate
        with activate(memory="80 GiB", data=False), torch.no_grad():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            held = torch.empty(20 << 30, dtype=torch.uint8, device="fakegpu")
            held.add_(1)
            matrix = torch.randn(32768, 32768, device="fakegpu")
            (matrix @ matrix).softmax(-1)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 200 * MiB
