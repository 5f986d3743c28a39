"""A fake device exists within its context, refuses nonsense by name, and leaves torch as it was."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pytest_park.fakegpu import activate, patches


@pytest.fixture(autouse=True)
def registered() -> None:
    """The registration of the back end is made once and stays; what is compared below is everything else."""
    with activate("1 MiB"):
        pass


@pytest.mark.parametrize("memory", [0, -1, "0 B", "-2 GiB", "12 GB", "much", "", 1.5, None, True])
def test_a_size_that_makes_no_sense_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match="size|memory"), activate(memory):
        pass
    assert not torch.fakegpu.is_available()


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "2", None])
def test_a_count_that_makes_no_sense_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="number of fake devices"), activate("1 GiB", count=count):
        pass
    assert not torch.fakegpu.is_available()


def test_activating_twice_is_refused_and_the_first_lives_on() -> None:
    with activate("1 GiB") as gpu:
        with pytest.raises(RuntimeError, match="active already"), activate("2 GiB"):
            pass
        assert torch.ones(2, device=gpu.device).sum() == 2
        assert torch.fakegpu.mem_get_info()[1] == gpu.memory == 1024**3


def test_devices_come_and_go_with_their_contexts() -> None:
    for count in (1, 3, 2):
        with activate("1 GiB", count=count) as gpu:
            assert [str(device.device) for device in gpu.devices] == [f"fakegpu:{index}" for index in range(count)]
            assert torch.fakegpu.device_count() == count
            with pytest.raises(RuntimeError, match=f"invalid device ordinal {count}"):
                torch.ones(1, device=f"fakegpu:{count}")
        assert torch.fakegpu.device_count() == 0
        assert not torch.fakegpu.is_available()


def test_each_context_starts_empty() -> None:
    for _ in range(2):
        with activate("1 GiB", count=2) as gpu:
            assert (gpu.allocated, gpu.reserved, gpu.peak_allocated, gpu.allocations) == (0, 0, 0, 0)
            assert gpu.transfers == []
            assert torch.fakegpu.current_device() == 0
            assert torch.fakegpu.current_stream().stream_id == 0
            torch.fakegpu.set_stream(torch.fakegpu.Stream())
            torch.fakegpu.set_device(1)
            torch.ones(1000, device=gpu.device)


def test_each_context_starts_anew_in_every_thread() -> None:
    with ThreadPoolExecutor(1) as other:
        with activate("1 GiB", count=2):
            other.submit(torch.fakegpu.set_device, 1).result()
            other.submit(lambda: torch.fakegpu.set_stream(torch.fakegpu.Stream())).result()
        with activate("1 GiB"):
            assert other.submit(torch.fakegpu.current_device).result() == 0
            assert other.submit(lambda: torch.fakegpu.current_stream().stream_id).result() == 0
            assert other.submit(lambda: torch.ones(2, device="fakegpu").sum().item()).result() == 2


def test_a_device_that_has_ended_still_has_its_numbers_and_says_so_of_the_rest() -> None:
    with activate("1 GiB") as gpu:
        kept = torch.ones(1000, device=gpu.device)
    assert (gpu.allocated, gpu.peak_allocated, gpu.memory) == (4096, 4096, 1024**3)
    for context in (nullcontext(), activate("2 GiB")):
        with context:
            for look in (lambda: gpu.devices, gpu.snapshot):
                with pytest.raises(RuntimeError, match="fakegpu:0 is no longer active"):
                    look()
    assert len(kept) == 1000


#: Ways to look at the bytes of a tensor, or to use it.
LOOKS = {
    "cpu": lambda tensor: tensor.cpu(),
    "add": lambda tensor: tensor + tensor,
    "add_": lambda tensor: tensor.add_(1),
    "tolist": lambda tensor: tensor.tolist(),
    "item": lambda tensor: tensor[0].item(),
    "repr": repr,
    "clone": lambda tensor: tensor.clone(),
    "sum of a view": lambda tensor: tensor.view(2, 2).sum(),
    "copy to the host": lambda tensor: torch.ones(4).copy_(tensor),
    "copy from the host": lambda tensor: tensor.copy_(torch.ones(4)),
    "cat": lambda tensor: torch.cat([tensor, tensor]),
    "linear": lambda tensor: torch.nn.functional.linear(tensor, tensor.view(1, 4)),
}
each_look = pytest.mark.parametrize("look", list(LOOKS.values()), ids=LOOKS)


@each_look
def test_a_tensor_cannot_be_used_after_the_end(look: Any) -> None:
    with activate("1 GiB") as gpu:
        tensor = torch.ones(4, device=gpu.device)
    with pytest.raises(RuntimeError):
        look(tensor)


@each_look
def test_a_tensor_cannot_be_used_on_a_later_device(look: Any) -> None:
    with activate("1 GiB") as gpu:
        tensor = torch.ones(4, device=gpu.device)
    with activate("1 GiB"), pytest.raises(RuntimeError):
        look(tensor)


def test_nothing_new_can_be_made_after_the_end() -> None:
    with pytest.raises(RuntimeError, match="no fakegpu is active"):
        torch.ones(2, device="fakegpu")
    with pytest.raises(RuntimeError, match="no fakegpu is active"):
        torch.ones(2).to("fakegpu")
    memory = torch.fakegpu.memory
    for ask in (memory.mem_get_info, memory._snapshot, memory._record_memory_history):
        with pytest.raises(RuntimeError, match="no fakegpu is active"):
            ask()
    with pytest.raises(RuntimeError, match="no fakegpu is active"):
        memory._set_allocator_settings("expandable_segments:True")


def test_a_tensor_that_outlives_its_device_does_not_count_on_the_next() -> None:
    with activate("1 GiB") as gpu:
        survivor = torch.ones(1000, device=gpu.device)
    with activate("1 GiB") as gpu:
        assert gpu.allocated == 0
        new = torch.ones(1000, device=gpu.device)
        before = gpu.allocated
        del survivor
        assert gpu.allocated == before == 4096
        del new
        assert gpu.allocated == 0


# -- everything is put back -------------------------------------------------------------------------------------------

_OWNERS = (
    torch, torch._C, torch.Tensor, torch._C.TensorBase, torch.UntypedStorage, torch.TypedStorage, torch.storage,
    torch.serialization, torch.accelerator, torch.random, torch.cuda, torch.autograd, torch.nn.Module,
    torch.nn.functional, torch.utils.data, torch.ops.aten, torch.Generator, torch.Stream, torch.Event,
    torch.utils.dlpack,
)  # fmt: skip


def attributes() -> list[dict[str, Any]]:
    """Every attribute of the parts of torch that a patch could be on."""
    return [dict(vars(owner)) for owner in _OWNERS]


def kernels() -> dict[str, list[str]]:
    """The operators that have a kernel of their own for the host, which nobody but torch should give."""
    return {
        key: sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key))
        for key in ("CPU", "AutogradCPU", "CUDA")
    }


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, was, now in zip(_OWNERS, before, after, strict=True)
        for name in was.keys() | now.keys()
        if was.get(name, None) is not now.get(name, None) and name != "__warningregistry__"
    ]


def test_the_comparison_sees_a_patch() -> None:
    before = attributes()
    with activate("1 GiB"):
        seen = differences(before, attributes())
    assert {"Tensor.data", "UntypedStorage.resize_", "torch.Generator", "torch.empty"} <= set(seen)


def test_torch_is_unchanged_afterwards() -> None:
    with activate("1 GiB") as gpu:  # what torch makes on first use is not a change
        torch.ones(2, device=gpu.device).sum().item()
    before, kernels_before = attributes(), kernels()
    with activate("1 GiB", count=2) as gpu:
        layer = torch.nn.Linear(4, 4).to(gpu.device)
        layer(torch.ones(2, 4, device=gpu.device)).sum().backward()
        torch.ones(3).pin_memory()
    assert differences(before, attributes()) == []
    assert kernels() == kernels_before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError, GeneratorExit])
def test_torch_is_unchanged_after_an_exception_inside(error: type[BaseException]) -> None:
    before, kernels_before = attributes(), kernels()
    with pytest.raises(error), activate("1 GiB"):
        raise error
    assert differences(before, attributes()) == []
    assert kernels() == kernels_before
    assert not torch.fakegpu.is_available()
    with activate("1 GiB") as gpu:
        assert torch.ones(2, device=gpu.device).sum() == 2


def test_torch_is_unchanged_after_a_failure_in_the_middle_of_the_patching(monkeypatch: pytest.MonkeyPatch) -> None:
    before, kernels_before = attributes(), kernels()
    every = list(patches._all())

    def half() -> Iterator[tuple[Any, str, Any]]:
        yield from every[: len(every) // 2]
        raise OSError("as asked")

    with monkeypatch.context() as patch:
        patch.setattr(patches, "_all", half)
        with pytest.raises(OSError, match="as asked"), activate("1 GiB"):
            raise AssertionError("must not be reached")
    assert differences(before, attributes()) == []
    assert kernels() == kernels_before
    with activate("1 GiB") as gpu:
        assert torch.ones(2, device=gpu.device).sum() == 2


def test_pinned_memory_is_not_pinned_after_the_end() -> None:
    with activate("1 GiB"):
        pinned = torch.ones(3).pin_memory()
        assert pinned.is_pinned()
    assert not pinned.is_pinned()
    with activate("1 GiB"):
        assert not pinned.is_pinned()


# -- processes that cannot have it ------------------------------------------------------------------------------------


def in_a_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_beside_another_back_end_it_is_refused_by_name() -> None:
    ran = in_a_process("""
        import torch
        torch.utils.rename_privateuse1_backend("othernpu")
        from pytest_park.fakegpu import activate
        for _ in range(2):
            try:
                with activate("1 GiB"):
                    print("activated")
            except RuntimeError as error:
                print(error)
        print(torch._C._get_privateuse1_backend_name(), hasattr(torch, "fakegpu"))
    """)
    assert ran.stdout.count("'othernpu' has taken it") == 2, ran
    assert ran.stdout.endswith("othernpu False\n")
    assert ran.stderr == ""


@pytest.mark.parametrize(
    "lacks",
    [
        "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
        "torch._C._acc.PrivateUse1Hooks",
        "torch._C._to_dlpack",
        "torch._C._swap_tensor_impl",
        "torch.cuda._sanitizer.AccessType",
    ],
)
def test_with_a_torch_that_lacks_what_it_needs_it_is_refused_by_name(lacks: str) -> None:
    _owner, _, name = lacks.rpartition(".")
    ran = in_a_process(f"""
        import torch, torch.cuda._sanitizer, torch.utils.backend_registration
        del {lacks}
        for _ in range(2):
            try:
                from pytest_park.fakegpu import activate
            except ImportError as error:
                print(error)
        print(torch._C._get_privateuse1_backend_name())
    """)
    assert ran.stdout.count(f"fakegpu works with torch 2.10 and newer; torch {torch.__version__} lacks") == 2, ran
    assert ran.stdout.count(name) == 2
    assert ran.stdout.endswith("privateuseone\n")
    assert ran.stderr == ""


def test_importing_it_registers_nothing() -> None:
    ran = in_a_process("""
        import pytest_park.fakegpu, torch
        print(torch._C._get_privateuse1_backend_name(), hasattr(torch, "fakegpu"), torch.accelerator.is_available())
    """)
    assert ran.stdout == "privateuseone False False\n", ran
    assert ran.stderr == ""


def test_a_process_ends_quietly_with_a_device_and_tensors_alive() -> None:
    ran = in_a_process("""
        import torch
        from pytest_park.fakegpu import activate
        context = activate("1 GiB")
        gpu = context.__enter__()
        kept = torch.nn.Linear(4, 4).to(gpu.device)
        output = kept(torch.ones(2, 4, device=gpu.device))
        torch.fakegpu.kept = output
        print(output.shape)
    """)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "torch.Size([2, 4])\n", "")
