"""Each device has random numbers of its own, which seeds and states bring back."""

from __future__ import annotations

import pytest
import torch

from pytest_park.fakegpu import FakeDevice


def some() -> list[float]:
    return torch.rand(4, device="fakegpu").tolist()


def test_torchs_seed_is_the_devices_too(fake_device: FakeDevice) -> None:
    torch.manual_seed(3)
    first = some()
    assert some() != first
    torch.manual_seed(3)
    assert some() == first
    torch.fakegpu.manual_seed(3)
    assert some() == first
    assert torch.fakegpu.initial_seed() == 3


def test_the_hosts_numbers_are_not_touched(fake_device: FakeDevice) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    some()
    torch.randn(2, device="fakegpu")
    torch.nn.functional.dropout(torch.ones(10, device="fakegpu"))
    assert torch.rand(4).tolist() == expected


def test_a_state_can_be_taken_and_put_back(fake_device: FakeDevice) -> None:
    state = torch.fakegpu.get_rng_state()
    first = some()
    torch.fakegpu.set_rng_state(state)
    assert some() == first
    assert state.device.type == "cpu"


def test_a_fork_leaves_the_state(fake_device: FakeDevice) -> None:
    torch.manual_seed(5)
    with torch.random.fork_rng(device_type="fakegpu"):
        forked = some()
    assert some() == forked


@pytest.mark.fake_device(count=2)
def test_devices_have_states_apart(fake_device: FakeDevice) -> None:
    torch.fakegpu.manual_seed_all(1)
    states = torch.fakegpu.get_rng_state_all()
    assert len(states) == 2
    second = torch.rand(3, device="fakegpu:1").tolist()
    assert torch.rand(3, device="fakegpu:0").tolist() == second  # one seed for all
    torch.rand(3, device="fakegpu:0")
    torch.fakegpu.set_rng_state_all(states)
    assert torch.rand(3, device="fakegpu:1").tolist() == second
    with torch.random.fork_rng(devices=[0, 1], device_type="fakegpu"):
        torch.rand(3, device="fakegpu:1")
    assert len(torch.fakegpu.default_generators) == 2


def test_a_generator_of_the_device(fake_device: FakeDevice) -> None:
    generator = torch.Generator("fakegpu")
    assert generator.device == fake_device.device
    assert isinstance(generator, torch.Generator)
    assert generator.manual_seed(7) is generator
    assert generator.initial_seed() == 7
    first = torch.randn(4, generator=generator, device="fakegpu").tolist()
    state = generator.get_state()
    twin = generator.clone_state()
    assert twin.device == fake_device.device
    second = torch.randn(4, generator=generator, device="fakegpu").tolist()
    assert torch.randn(4, generator=twin, device="fakegpu").tolist() == second != first
    generator.set_state(state)
    assert torch.randn(4, generator=generator, device="fakegpu").tolist() == second
    generator.manual_seed(7)
    assert torch.randn(4, generator=generator, device="fakegpu").tolist() == first


def test_a_generator_is_used_by_every_kind_of_sampling(fake_device: FakeDevice) -> None:
    def all_kinds() -> list[object]:
        generator = torch.Generator(device="fakegpu").manual_seed(1)
        given = torch.full((5,), 0.5, device="fakegpu")
        return [
            torch.rand(3, generator=generator, device="fakegpu").tolist(),
            torch.randint(100, (3,), generator=generator, device="fakegpu").tolist(),
            torch.randperm(9, generator=generator, device="fakegpu").tolist(),
            torch.bernoulli(given, generator=generator).tolist(),
            torch.multinomial(given, 2, generator=generator).tolist(),
            torch.normal(0.0, given, generator=generator).tolist(),
            given.clone().uniform_(generator=generator).tolist(),
            given.clone().exponential_(generator=generator).tolist(),
        ]

    assert all_kinds() == all_kinds()


def test_generators_of_the_host_are_torchs_own(fake_device: FakeDevice) -> None:
    generator = torch.Generator()
    assert generator.device.type == torch.Generator("cpu").device.type == "cpu"
    assert isinstance(generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert (
        torch.rand(2, generator=generator.manual_seed(1)).tolist()
        == torch.rand(2, generator=torch.Generator().manual_seed(1)).tolist()
    )


def test_a_generator_of_the_host_is_refused_on_the_device(fake_device: FakeDevice) -> None:
    """As on CUDA: "Expected a 'cuda' device type for generator but found 'cpu'"."""
    with pytest.raises(RuntimeError, match="(?i)generator"):
        torch.rand(2, generator=torch.Generator(), device="fakegpu")


@pytest.mark.parametrize("made", ["rand", "randn", "randperm"])
def test_a_generator_of_the_device_is_refused_on_the_host(fake_device: FakeDevice, made: str) -> None:
    """As on CUDA; it is what a forgotten ``device=`` comes to."""
    generator = torch.Generator("fakegpu")
    assert getattr(torch, made)(2, generator=generator, device="fakegpu").device == fake_device.device
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'fakegpu'"):
        getattr(torch, made)(2, generator=generator)


def test_dropout_drops_on_the_device(fake_device: FakeDevice) -> None:
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(torch.ones(1000, device="fakegpu"), 0.25)
    zeros = int((dropped == 0).sum())
    assert 150 < zeros < 350
    assert dropped[dropped != 0].unique().tolist() == pytest.approx([4 / 3])
