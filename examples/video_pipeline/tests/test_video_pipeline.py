"""What the example promises, on smaller models and a smaller video than ``python -m examples.video_pipeline`` has."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from examples.video_pipeline.components import LAYERS, build_components
from examples.video_pipeline.pipeline import VideoPipeline, VideoRequest
from examples.video_pipeline.runs import LARGE_CARD, MiB, OutOfMemory, Run, just_too_small
from examples.video_pipeline.tests.small_pipeline import REQUEST, SIZES, run_once
from park_core import OffloadConfig, PerformanceMode, WeightsParkedError
from pytest_park.fakegpu import activate

PARKING = OffloadConfig(performance_mode=PerformanceMode.MEMORY)
SCALARS = 4096  # bytes


@pytest.fixture
def large() -> Run:
    return run_once(LARGE_CARD, REQUEST, parking="auto", sizes=SIZES)


@pytest.fixture
def card(large: Run) -> int:
    return just_too_small(large)


@pytest.fixture
def without(card: int) -> Run:
    return run_once(card, REQUEST, parking="never", sizes=SIZES)


@pytest.fixture
def parked(card: int) -> Run:
    return run_once(card, REQUEST, parking="auto", sizes=SIZES)


def test_without_parking_decode_runs_out_of_memory_by_a_few_mib(without: Run, large: Run, card: int) -> None:
    assert 0 < large.stage("decode").peak - card <= 2 * MiB
    assert without.frames is None
    assert without.failed_stage is not None
    assert without.failed_stage.name == "decode"
    assert without.out_of_memory is not None
    # what is asked of the driver is a segment of 20 MiB
    assert 0 < without.out_of_memory.asked - without.out_of_memory.free <= 8 * MiB


def test_with_parking_the_same_card_makes_the_same_frames_bit_for_bit(parked: Run, large: Run) -> None:
    assert parked.out_of_memory is None
    assert large.frames is not None
    assert large.frames.shape == (3, REQUEST.frames, REQUEST.height, REQUEST.width)
    assert large.frames.isfinite().all()
    assert large.frames.std() > 0.1
    assert torch.equal(parked.frames, large.frames)


def test_decode_no_longer_has_the_non_layer_weights_of_the_others_beside_it(parked: Run, large: Run) -> None:
    idle = large.non_layer_weights["text_encoder"] + large.non_layer_weights["transformer"]
    # The allocator does not split blocks for less than 1 MiB, so that peaks differ by a little more or less.
    assert large.stage("decode").peak - parked.stage("decode").peak == pytest.approx(idle, abs=4 * MiB)


def test_every_component_is_parked_after_its_stage(parked: Run) -> None:
    assert [stage.parked.decision.verdict for stage in parked.stages] == ["park"] * 3
    freed = {stage.component: stage.parked.bytes_freed for stage in parked.stages}
    assert freed == dict(parked.non_layer_weights)


def test_with_room_nothing_is_parked_and_no_byte_moves_for_it(large: Run) -> None:
    assert [stage.parked.decision.verdict for stage in large.stages] == ["keep"] * 3
    assert [stage.parked.bytes_freed for stage in large.stages] == [0] * 3
    assert not any(stage.restored and stage.restored.bytes_to_device for stage in large.stages)
    assert large.frames is not None
    assert large.to_host - large.frames.nbytes <= SCALARS


def test_with_room_no_host_copy_that_costs_memory_is_held() -> None:
    # the text encoder's weights stay mapped from its checkpoint, which holds no memory
    components = build_components(SIZES)
    layers = {id(p) for name, module in components.modules.items() for p in _layer_weights(name, module)}
    weights = {
        f"{component}.{name}": weight
        for component, module in components.modules.items()
        for name, weight in module.named_parameters()
        if id(weight) not in layers and component != "text_encoder"
    }
    on_the_host = {name: weakref.ref(weight.untyped_storage()) for name, weight in weights.items()}
    with activate(memory=LARGE_CARD) as gpu:
        VideoPipeline(components, gpu.device, PARKING)(REQUEST)
        assert {weight.device for weight in weights.values()} == {gpu.device}
        assert [name for name, storage in on_the_host.items() if storage() is not None] == []


def _layer_weights(name: str, module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for layers in LAYERS[name] for p in module.get_submodule(layers).parameters()]


def test_what_moves_for_parking_is_each_non_layer_weight_once_at_most(parked: Run) -> None:
    for stage in parked.stages:
        assert stage.parked.bytes_to_host <= parked.non_layer_weights[stage.component]
        assert stage.restored is None or stage.restored.bytes_to_device == 0  # each one is on the card before its stage


def test_the_reports_tell_what_moved(parked: Run) -> None:
    assert parked.frames is not None
    told = sum(stage.parked.bytes_to_host for stage in parked.stages)
    assert 0 <= parked.to_host - parked.frames.nbytes - told <= SCALARS


def test_the_blocks_of_the_vae_are_resident_during_its_stage(large: Run) -> None:
    # The decoder runs twice for these frames; streamed blocks would go to the card twice.
    assert 0 <= large.stage("decode").streamed - large.layer_weights["vae"] <= SCALARS


def test_the_blocks_of_the_dit_are_streamed_in_each_step(large: Run) -> None:
    assert large.stage("denoise").streamed > 0.9 * REQUEST.steps * large.layer_weights["transformer"]


def test_after_the_request_the_card_holds_what_the_strategies_say(parked: Run, large: Run) -> None:
    assert parked.live_after == sum(parked.buffers.values())
    assert large.live_after == sum(large.buffers.values()) + sum(large.non_layer_weights.values())


def test_after_running_out_of_memory_the_card_holds_what_the_strategies_say(without: Run) -> None:
    assert without.live_after == sum(without.buffers.values()) + sum(without.non_layer_weights.values())


def test_a_second_request_makes_the_same_frames_on_the_same_card(card: int, large: Run) -> None:
    with activate(memory=card) as gpu:
        pipeline = VideoPipeline(build_components(SIZES), gpu.device, PARKING)
        first = pipeline(REQUEST)
        live = gpu.requested
        second = pipeline(REQUEST)
        assert gpu.requested == live
    assert torch.equal(first, large.frames)
    assert torch.equal(second, large.frames)


def test_a_stage_that_fails_leaves_pipeline_and_card_usable(card: int, large: Run) -> None:
    with activate(memory=card) as gpu:
        pipeline = VideoPipeline(build_components(SIZES), gpu.device, PARKING)
        for component, failing, not_yet_used in (
            ("text_encoder", "encoder.layer.5", ["transformer", "vae"]),
            ("transformer", "blocks.1.attn1", ["vae"]),
            ("vae", "decoder.conv_out", []),
        ):
            module = pipeline.components.modules[component].get_submodule(failing)
            hook = module.register_forward_pre_hook(lambda *_: gpu.fail_allocation(after=1))
            with pytest.raises(torch.OutOfMemoryError):
                pipeline(REQUEST)
            hook.remove()
            gc.collect()
            still_there = sum(large.non_layer_weights[name] for name in not_yet_used)
            assert gpu.requested == sum(large.buffers.values()) + still_there
        assert torch.equal(pipeline(REQUEST), large.frames)


def test_a_parked_component_says_so_when_it_is_used(card: int) -> None:
    with activate(memory=card) as gpu:
        pipeline = VideoPipeline(build_components(SIZES), gpu.device, PARKING)
        pipeline.components.vae.park_non_layer_weights()
        with pytest.raises(WeightsParkedError, match="vae"), torch.no_grad():
            pipeline.components.vae.decode(torch.zeros(1, 16, 1, 8, 8, device=gpu.device))


@pytest.mark.parametrize("wrong", [{"frames": 8}, {"frames": 0}, {"height": 100}, {"width": 0}, {"steps": 0}])
def test_a_request_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VideoRequest(prompt="A fox.", **wrong)


def test_the_sizes_of_a_failed_allocation_are_read_from_torchs_message() -> None:
    cuda = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.52 GiB of which 1.50 MiB is "
        "free. Including non-PyTorch memory, this process has 11.86 GiB memory in use."
    )
    read = OutOfMemory.from_message(cuda)
    assert (read.asked, read.free) == (20 * MiB, 1.5 * MiB)
    with pytest.raises(ValueError, match="not the message"):
        OutOfMemory.from_message("something else")
