"""``torch.accelerator`` and ``torch.get_device_module`` know the fake device while there is one."""

from __future__ import annotations

import pytest
import torch

from pytest_park.fakegpu import FakeDevice, activate


@pytest.mark.fake_device(count=2)
def test_torch_accelerator_counts_and_chooses_devices(fake_device: FakeDevice) -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.device_count() == 2
    assert accelerator.current_accelerator() == torch.device("fakegpu")
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(1)
    assert accelerator.current_device_index() == torch.fakegpu.current_device() == 1
    assert torch.ones(1, device="fakegpu").device.index == 1
    with accelerator.device_index(0):
        assert accelerator.current_device_index() == 0
    assert accelerator.current_device_index() == 1


def test_torch_accelerator_measures_memory(fake_device: FakeDevice) -> None:
    accelerator = torch.accelerator
    tensor = torch.ones(1024, device=fake_device.device)
    assert accelerator.memory_allocated() == fake_device.allocated == 4096
    assert accelerator.memory_reserved() == fake_device.reserved
    assert accelerator.max_memory_allocated() == 4096
    assert accelerator.max_memory_reserved() == fake_device.reserved
    assert accelerator.get_memory_info() == (fake_device.memory - fake_device.reserved, fake_device.memory)
    assert accelerator.memory_stats()["allocated_bytes.all.current"] == 4096
    del tensor
    assert accelerator.max_memory_allocated() == 4096
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == 0
    accelerator.reset_accumulated_memory_stats()
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0
    accelerator.synchronize()


def test_torch_accelerator_has_streams(fake_device: FakeDevice) -> None:
    stream = torch.Stream(device="fakegpu")
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == torch.fakegpu.current_stream() == stream
    torch.accelerator.set_stream(torch.fakegpu.default_stream())
    assert torch.accelerator.current_stream().stream_id == 0


def test_the_device_module_is_found_by_name_and_device(fake_device: FakeDevice) -> None:
    assert torch.get_device_module("fakegpu") is torch.fakegpu
    assert torch.get_device_module(fake_device.device) is torch.fakegpu
    assert torch.get_device_module() is torch.fakegpu


def test_the_device_module_answers_what_others_ask_of_it(fake_device: FakeDevice) -> None:
    module = torch.fakegpu
    assert module.is_available()
    assert module.device_count() == 1
    assert module.get_device_name() == "fakegpu"
    assert module.get_device_properties(0).total_memory == fake_device.memory
    assert module.get_device_properties(fake_device.device).name == "fakegpu"
    assert module.get_device_capability() == (0, 0)
    assert module.is_bf16_supported()
    assert module.mem_get_info() == (fake_device.memory, fake_device.memory)
    assert module.max_memory_reserved() == 0
    assert module.memory_stats()["num_ooms"] == 0
    assert not hasattr(module, "nonsense")


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")])
def test_another_devices_memory_is_refused(fake_device: FakeDevice, device: torch.device | str) -> None:
    with pytest.raises(ValueError, match="Expected a fakegpu device"):
        torch.fakegpu.memory_allocated(device)


@pytest.mark.parametrize("index", [1, 100])
def test_a_device_that_is_not_there_is_refused(fake_device: FakeDevice, index: int) -> None:
    with pytest.raises(RuntimeError, match=f"invalid device ordinal {index}"):
        torch.fakegpu.memory_allocated(index)
    with pytest.raises(RuntimeError, match=f"invalid device ordinal {index}"):
        torch.fakegpu.set_device(index)
    assert torch.fakegpu.current_device() == 0


def test_there_is_no_accelerator_outside() -> None:
    with activate("1 GiB"):
        pass
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0


def test_a_tensor_and_a_module_know_the_device(fake_device: FakeDevice) -> None:
    tensor = torch.ones(2).fakegpu()  # type: ignore[attr-defined]
    assert tensor.is_fakegpu  # type: ignore[attr-defined]
    assert tensor.device == fake_device.device
    assert torch.nn.Linear(2, 2).fakegpu().weight.device == fake_device.device  # type: ignore[attr-defined]
    assert not tensor.is_cpu
    assert not tensor.is_cuda
    assert "device='fakegpu:0'" in repr(tensor)
    assert repr(torch.ones(2, dtype=torch.complex64, device="fakegpu")) == (
        "tensor([1.+0.j, 1.+0.j], device='fakegpu:0')"
    )


def test_the_default_device(fake_device: FakeDevice) -> None:
    with torch.device("fakegpu"):
        layer = torch.nn.Linear(3, 3)
        assert layer.weight.device == torch.ones(3).device == torch.tensor([1]).device == fake_device.device
        assert layer(torch.ones(1, 3)).shape == (1, 3)
    torch.set_default_device("fakegpu")
    try:
        assert torch.ones(3).device == torch.get_default_device() == fake_device.device
    finally:
        torch.set_default_device(None)
    assert torch.ones(3).device.type == "cpu"


def test_optimizers_and_checkpointing_work(fake_device: FakeDevice) -> None:
    def trained(device: str) -> list[float]:
        weight = torch.nn.Parameter(torch.arange(1.0, 4.0, device=device))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.utils.checkpoint.checkpoint(lambda x: (x**3).sum(), weight, use_reentrant=False)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
        assert weight.device.type == device
        return weight.tolist()

    assert trained("fakegpu") == pytest.approx(trained("cpu"))
