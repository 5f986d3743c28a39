"""Any sequence of uses, writes, failures and shortages keeps every value: a random walk beside a plain component."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from conftest import Denoiser, assert_same_bits, snapshot
from park_core import LayerwiseOffloadManager, OffloadConfig, Parking, WeightsParkedError
from park_core.component import offload_of
from park_core.parked_tensor import is_parked
from pytest_park.fakegpu import activate

WEIGHTS = sorted(name for name, _ in Denoiser().named_parameters())
LAYERS = st.integers(0, 3)
CONFIGS = st.fixed_dictionaries(
    {
        "parking": st.sampled_from(["always", "auto"]),
        "performance_mode": st.just("memory"),
        "keep_host_copies": st.booleans(),
        "pin_memory": st.booleans(),
        "prefetch": st.integers(0, 2),
        "resident_layers": st.integers(0, 2),
    }
)
FAULTS = st.sampled_from(["fail_allocation", "fail_host_copy", "fail_device_copy"])
ERRORS = (MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)


class Walk(RuleBasedStateMachine):
    """``component`` is offloaded on a fake device; ``plain`` lives on the host and gets the same writes."""

    @initialize(config=CONFIGS)
    def start(self, config: dict[str, Any]) -> None:
        self.activation = activate(memory="64 MiB")
        self.gpu = self.activation.__enter__()
        torch.manual_seed(0)
        self.plain = Denoiser().eval().requires_grad_(False)
        self.component = copy.deepcopy(self.plain)
        self.tokens = torch.arange(12)
        self.on_device = self.tokens.to(self.gpu.device)
        self.count = 0
        self.configure(config)

    def teardown(self) -> None:
        if not hasattr(self, "activation"):
            return
        try:
            self.gpu.clear_faults()
            self.gpu.other_process = 0
            self.component.disable_layerwise_offload()
            assert not any(is_parked(weight) for weight in self.component.parameters())
            self.values_are_right()
            self.same_output()
            owned = {t.untyped_storage() for t in [*self.component.parameters(), *self.component.buffers()]}
            assert self.gpu.requested == sum(storage.nbytes() for storage in owned) + self.on_device.nbytes
            assert self.gpu.races == ()
        finally:
            del self.component, self.on_device
            self.activation.__exit__(None, None, None)

    @property
    def manager(self) -> LayerwiseOffloadManager:
        return self.component.layerwise_offload_managers[0]

    @property
    def parking(self) -> Parking:
        offload = offload_of(self.component)
        assert offload is not None
        return offload.parking

    def parked(self) -> bool:
        layers = {id(weight) for weight in self.component.blocks.parameters()}
        return any(is_parked(weight) for weight in self.component.parameters() if id(weight) not in layers)

    # -- what users do -------------------------------------------------------------------------------------------------

    @rule(config=CONFIGS)
    def configure(self, config: dict[str, Any]) -> None:
        self.component.configure_layerwise_offload(OffloadConfig(**config), device=self.gpu.device)
        assert not self.parked()

    @rule(need=st.sampled_from([None, 0, 1 << 40]), times=st.integers(1, 3))
    def park(self, need: int | None, times: int) -> None:
        for turn in range(times):
            before = self.gpu.requested
            report = self.component.park_non_layer_weights(need=need)
            assert before - self.gpu.requested == report.bytes_freed
            assert not (turn and report.bytes_freed)

    @rule(times=st.integers(1, 2))
    def restore(self, times: int) -> None:
        for turn in range(times):
            allocations = self.gpu.allocations
            self.component.restore_non_layer_weights()
            assert not self.parked()
            assert not turn or self.gpu.allocations == allocations

    @rule()
    def run(self) -> None:
        if not self.parked():
            self.same_output()
            return
        try:
            self.component(self.on_device)
        except WeightsParkedError:
            return
        raise AssertionError("computed with a placeholder")

    def same_output(self) -> None:
        expected, actual = self.plain(self.tokens), self.component(self.on_device).cpu()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    @rule(layer=LAYERS, wait=st.booleans())
    def prefetch(self, layer: int, wait: bool) -> None:
        self.manager.prefetch_layer(layer, non_blocking=not wait)

    @rule()
    def prepare(self) -> None:
        self.component.prepare_for_next_req()

    @rule()
    def load_all(self) -> None:
        self.manager.load_all_layers()

    @rule(layer=LAYERS)
    def release(self, layer: int) -> None:
        self.manager.release_layer(layer)

    @rule()
    def release_all(self) -> None:
        self.manager.release_all()

    # -- writes --------------------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(WEIGHTS),
        how=st.sampled_from(["copy_", "data.copy_", "data =", "update", "load", "assign", "new parameter"]),
    )
    def write(self, name: str, how: str) -> None:
        self.count += 1
        target = self.plain.get_parameter(name)
        value = torch.full_like(target, self.count % 2 / 8)  # what was there before comes back, too
        weight = self.component.get_parameter(name)
        with torch.no_grad():
            target.copy_(value)
            if how == "copy_":
                weight.copy_(value)
            elif how == "data.copy_":
                weight.data.copy_(value)
            elif how == "data =":
                weight.data = value.to(self.gpu.device)
            elif how == "update":
                self.component.update_cpu_weights({name: value})
            elif how == "load":
                self.component.load_state_dict({name: value}, strict=False)
            elif how == "assign":
                self.component.load_state_dict({name: value.to(self.gpu.device)}, strict=False, assign=True)
                self.component.requires_grad_(False)
            else:
                path, _, last = name.rpartition(".")
                new = nn.Parameter(value.to(self.gpu.device), requires_grad=False)
                setattr(self.component.get_submodule(path), last, new)
            if name == "embed.weight" and how in ("data =", "assign", "new parameter"):
                self.retie()

    def retie(self) -> None:
        """Replacing a tied weight unties it; a user ties it again."""
        self.component.head.weight = self.component.embed.weight

    @rule(
        name=st.sampled_from(WEIGHTS),
        how=st.sampled_from(["copy_", "data.copy_", "update", "load"]),
        resident=st.booleans(),
    )
    def use(self, name: str, how: str, resident: bool) -> None:
        """Twice a whole use, with a write during it or between two, as the host copies of the first may be kept."""
        for _ in range(2):
            self.restore(1)
            self.component.prepare_for_next_req()
            if resident:
                self.manager.load_all_layers()
            self.write(name, how)
            self.same_output()
            self.manager.release_all()
            self.park(1 << 40, 1)
            self.values_are_right()

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    @rule(
        verb=st.sampled_from(["park", "restore", "load", "release"]),
        fault=FAULTS,
        k=st.integers(1, 8),
        interrupt=st.booleans(),
    )
    def fail(self, verb: str, fault: str, k: int, interrupt: bool) -> None:
        getattr(self.gpu, fault)(after=k, error=KeyboardInterrupt() if interrupt else None)
        before = self.parked()
        try:
            {
                "park": self.component.park_non_layer_weights,
                "restore": self.component.restore_non_layer_weights,
                "load": self.manager.load_all_layers,
                "release": self.manager.release_all,
            }[verb]()
        except ERRORS:
            if verb in ("park", "restore"):
                assert self.parked() == before
        finally:
            self.gpu.clear_faults()

    @rule(room=st.sampled_from([0, 1024, 1 << 20, 1 << 40]))
    def crowd(self, room: int) -> None:
        self.gpu.empty_cache()
        self.gpu.other_process = 0
        self.gpu.other_process = max(0, self.gpu.free - max(room, 6 << 20))

    # -- what holds at any time ----------------------------------------------------------------------------------------

    @invariant()
    def values_are_right(self) -> None:
        assert_same_bits(snapshot(self.component), snapshot(self.plain))

    @precondition(lambda self: self.count % 3 == 0)
    @invariant()
    def a_copy_is_independent(self) -> None:
        clone = copy.deepcopy(self.component)
        assert_same_bits(snapshot(clone), snapshot(self.plain))


Walk.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestWalk = Walk.TestCase
