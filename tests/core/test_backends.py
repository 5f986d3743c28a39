"""Headroom on every kind of device, by the functions that its module in torch really has."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import ALWAYS
from park_core import Headroom, device_headroom
from park_core.decision import decide
from park_core.transfer import synchronize

GiB = 1024**3


class NPU:
    """Functions of ``torch_npu.npu`` with the names that they have in ``torch.cuda``, as its ``__all__`` lists them."""

    def memory_reserved(self, device: Any = None) -> Any: ...
    def memory_allocated(self, device: Any = None) -> Any: ...
    def memory_stats(self, device: Any = None) -> Any: ...
    def memory_snapshot(self) -> Any: ...
    def mem_get_info(self, device: Any = None) -> Any: ...
    def get_device_properties(self, device_name: Any = None) -> Any: ...
    def get_per_process_memory_fraction(self, device: Any = None) -> Any: ...
    def is_current_stream_capturing(self) -> Any: ...
    def synchronize(self, device: Any = None) -> Any: ...


class Module:
    """Answers for a device module, but only to functions that the real one has, and called as that can be called."""

    def __init__(self, real: object, **answers: Any) -> None:
        self.real, self.answers = real, answers

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)  # an AttributeError where the real one raises one

        def answer(*args: Any, **kwargs: Any) -> Any:
            inspect.signature(real).bind(*args, **kwargs)
            value = self.answers[name]
            if isinstance(value, Exception):
                raise value
            return value

        return answer


def properties(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(name="a card", total_memory=24 * GiB, **values)


# What get_device_properties has: torch/_C/__init__.pyi for CUDA and XPU, torch_npu/csrc/npu/Module.cpp for NPU, which
# got is_integrated late. ROCm is torch.cuda.
PROPERTIES = {
    "cuda": (torch.cuda, "cuda", properties(is_integrated=0)),
    "rocm": (torch.cuda, "cuda", properties(is_integrated=0, gcnArchName="gfx1100")),
    "xpu": (torch.xpu, "xpu", properties(is_integrated_gpu=False)),
    "npu": (NPU(), "privateuseone", properties()),
}


def card(monkeypatch: pytest.MonkeyPatch, kind: str, **answers: Any) -> torch.device:
    real, device_type, found = PROPERTIES[kind]
    module = Module(
        real,
        **{
            "memory_reserved": 6 * GiB,
            "memory_allocated": 5 * GiB,
            "memory_stats": {},
            "mem_get_info": (10 * GiB, 24 * GiB),
            "get_device_properties": found,
            "get_per_process_memory_fraction": 1.0,
            "is_current_stream_capturing": False,
            "synchronize": None,
        }
        | answers,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return torch.device(device_type, 0)


kinds = pytest.mark.parametrize("kind", PROPERTIES)


@kinds
def test_free_memory_and_unused_reserve_are_room(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    headroom = device_headroom(card(monkeypatch, kind), request=GiB)
    assert headroom == Headroom(bytes=11 * GiB, driver_free=10 * GiB, reserved_unused=GiB)


@kinds
def test_the_cap_of_the_process_counts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    headroom = device_headroom(card(monkeypatch, kind, get_per_process_memory_fraction=0.5))
    assert (headroom.cap, headroom.bytes) == (12 * GiB, 7 * GiB)


@pytest.mark.parametrize(
    ("reading", "free", "note"),
    [
        (RuntimeError("doesn't support querying the available free memory"), 18, "mem_get_info raised RuntimeError"),
        ((24 * GiB, 24 * GiB), 18, "although this process has reserved"),  # XPU: pytorch issue 161381
        ((0, 24 * GiB), 0, "set parking to always or never"),
        ((0, 0), 18, "0 B free of 0 B"),
    ],
    ids=["raises", "free equals total", "nothing free", "all zero"],
)
@kinds
def test_a_reading_that_cannot_be_right_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, reading: Any, free: int, note: str
) -> None:
    headroom = device_headroom(card(monkeypatch, kind, mem_get_info=reading))
    assert headroom.driver_free == free * GiB
    assert note in headroom.note


@pytest.mark.parametrize(
    ("kind", "flag"), [("cuda", "is_integrated"), ("rocm", "is_integrated"), ("xpu", "is_integrated_gpu")]
)
def test_memory_that_is_the_hosts_is_declined(monkeypatch: pytest.MonkeyPatch, kind: str, flag: str) -> None:
    unsupported = RuntimeError("doesn't support querying the available free memory")
    device = card(monkeypatch, kind, get_device_properties=properties(**{flag: 1}), mem_get_info=unsupported)
    assert device_headroom(device).unified
    decision = decide(ALWAYS, device, resident=1, parked=0, new_host_bytes=1, returning=0, need=None)
    assert (decision.verdict, decision.reason[:35]) == ("refuse", "the device has no memory of its own")


def test_an_npu_that_cannot_tell_its_cap_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    device = card(monkeypatch, "npu")
    monkeypatch.delattr(NPU, "get_per_process_memory_fraction")  # as older ones do
    assert device_headroom(device).cap is None


@pytest.mark.parametrize(("reserved", "free"), [(6, 12), (20, 0)])
def test_mps_shares_its_memory_with_the_host_and_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, reserved: int, free: int
) -> None:
    module = Module(
        torch.mps,
        recommended_max_memory=18 * GiB,
        driver_allocated_memory=reserved * GiB,
        current_allocated_memory=5 * GiB,
        synchronize=None,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device("mps", 0)
    unused = (reserved - 5) * GiB
    assert device_headroom(device) == Headroom(free * GiB + unused, free * GiB, unused, unified=True)
    decision = decide(ALWAYS, device, resident=GiB, parked=0, new_host_bytes=1, returning=0, need=None)
    assert decision.verdict == "refuse"
    synchronize(device)


@kinds
def test_the_right_device_is_waited_for(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    synchronize(card(monkeypatch, kind))
