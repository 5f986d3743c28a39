"""What keeps device memory alive has a name."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pytest_park.fakegpu import FakeDevice, activate

HERE = f"of module {__name__} (Tensor(3,))"
cache: dict[str, Any] = {}


def fresh() -> Tensor:
    return torch.ones(3, device="fakegpu")


def names(fake_device: FakeDevice) -> list[str]:
    return [name for holder in fake_device.holders() for name in holder.names]


def test_a_local_variable_is_named_with_its_function(fake_device: FakeDevice) -> None:
    activations = torch.ones(256, device="fakegpu")
    (holder,) = fake_device.holders()
    assert holder.bytes == activations.nbytes
    assert holder.names == ("activations of test_a_local_variable_is_named_with_its_function() (Tensor(256,))",)


def test_parameters_buffers_and_gradients_are_named_by_the_module_that_has_them(fake_device: FakeDevice) -> None:
    model = nn.Sequential(nn.BatchNorm1d(64, device="fakegpu"))
    model[0].bias.grad = torch.ones(64, device="fakegpu")
    here = "of test_parameters_buffers_and_gradients_are_named_by_the_module_that_has_them()"
    assert {
        f"model.0.weight {here} (Parameter(64,))",
        f"model.0.running_mean {here} (Tensor(64,))",
        f"model.0.bias.grad {here} (Tensor(64,))",
    } <= set(names(fake_device))


def test_a_view_holds_the_whole_storage(fake_device: FakeDevice) -> None:
    corner = torch.ones(64, 64, device="fakegpu")[:1, :1]
    (holder,) = fake_device.holders()
    assert holder.bytes == 64 * 64 * 4
    assert holder.names == ("corner of test_a_view_holds_the_whole_storage() (Tensor(1, 1))",)
    assert corner.shape == (1, 1)


def test_what_a_module_of_python_holds_is_named_with_it(fake_device: FakeDevice) -> None:
    cache["activations"] = [fresh()]
    assert names(fake_device) == [f"cache['activations'][0] {HERE}"]
    cache.clear()


class Kept:
    of_the_class: Tensor | None = None
    __slots__ = ("slot",)


def test_what_a_class_and_an_object_with_slots_hold_is_named(fake_device: FakeDevice) -> None:
    Kept.of_the_class = fresh()
    assert names(fake_device) == ["of_the_class of class Kept (Tensor(3,))"]
    Kept.of_the_class = None
    kept = Kept()
    kept.slot = fresh()
    assert names(fake_device) == [
        "kept.slot of test_what_a_class_and_an_object_with_slots_hold_is_named() (Tensor(3,))"
    ]


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.ones(size, device="fakegpu")


def test_the_cache_of_a_function_is_named_with_it(fake_device: FakeDevice) -> None:
    table(3)
    assert names(fake_device) == ["the cache of table() (Tensor(3,))"]
    table.cache_clear()


def test_a_closure_is_named_with_its_function(fake_device: FakeDevice) -> None:
    def closed() -> Any:
        enclosed = fresh()
        return lambda: enclosed

    cache["hook"] = closed()
    (name,) = names(fake_device)
    assert name.startswith("__closure__[0] of function test_a_closure_is_named_with_its_function.<locals>.closed")
    cache.clear()


def test_a_suspended_function_is_named(fake_device: FakeDevice) -> None:
    def layers() -> Iterator[int]:
        waiting = fresh()
        yield len(waiting)

    suspended = layers()
    assert next(suspended) == 3
    (name,) = names(fake_device)
    assert name.startswith("waiting of test_a_suspended_function_is_named.<locals>.layers(), which is suspended")


def test_a_thread_is_named(fake_device: FakeDevice) -> None:
    started, end = threading.Event(), threading.Event()

    def work() -> None:
        mine = fresh()
        started.set()
        end.wait()
        assert len(mine) == 3

    thread = threading.Thread(target=work, name="courier")
    thread.start()
    started.wait()
    found = names(fake_device)
    end.set()
    thread.join()
    assert found == ["mine of test_a_thread_is_named.<locals>.work() in thread 'courier' (Tensor(3,))"]


def test_what_a_traceback_keeps_is_named(fake_device: FakeDevice) -> None:
    def fails() -> None:
        inside = fresh()
        raise ValueError(len(inside))

    try:
        fails()
    except ValueError as caught:
        error = caught
    (name,) = names(fake_device)
    assert (
        name == "inside of test_what_a_traceback_keeps_is_named.<locals>.fails(), which a traceback keeps (Tensor(3,))"
    )
    del error


def test_where_there_is_no_name_there_is_a_kind(fake_device: FakeDevice) -> None:
    cycle: list[Any] = [{"keys": fresh()}]
    cycle.append(cycle)
    del cycle
    assert names(fake_device) == ["a list[0]['keys'] (Tensor(3,))"]


def test_looking_keeps_nothing_alive(fake_device: FakeDevice) -> None:
    tensor = torch.ones(256, device="fakegpu")
    found = fake_device.holders()
    del tensor
    assert fake_device.requested == 0
    assert len(found) == 1


def test_what_only_autograd_holds_is_said_to_be_held_by_nobody_with_a_name(fake_device: FakeDevice) -> None:
    weight = torch.ones(16, device="fakegpu", requires_grad=True)
    loss = (weight * 2).exp().sum()
    texts = [str(holder) for holder in fake_device.holders()]
    assert any("nobody that Python can name" in text for text in texts)
    assert loss.requires_grad


def test_after_the_end_of_the_device_what_outlived_it_is_still_named() -> None:
    with activate("1 GiB") as gpu:
        survivor = fresh()
    assert gpu.requested == 12
    assert names(gpu) == ["survivor of test_after_the_end_of_the_device_what_outlived_it_is_still_named() (Tensor(3,))"]
    del survivor
    assert (gpu.requested, gpu.holders()) == (0, [])
