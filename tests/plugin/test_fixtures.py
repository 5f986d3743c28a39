"""The fixtures: what they give, what they refuse, and that nothing is left of them."""

import pytest
import torch

from pytest_park import GiB, MiB


def test_fake_device_is_a_device_that_tensors_live_on(fake_device):
    weight = torch.arange(6.0).to(fake_device.device)
    assert weight.device == fake_device.device == torch.device("fakegpu", 0)
    assert fake_device.allocated == 512
    assert torch.equal((weight + 1).cpu(), torch.arange(6.0) + 1)


def test_fake_device_has_the_memory_of_the_options(fake_device):
    assert fake_device.memory == 12 * GiB


def test_park_device_is_the_fake_one_without_a_real_gpu(park_device, fake_device):
    assert park_device is fake_device


def test_one_test_after_another_gets_a_fresh_device(pytester):
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.parametrize("turn", ["first", "second"])
        def test_it(fake_device, turn):
            assert fake_device.allocated == fake_device.peak_allocated == fake_device.other_process == 0
            fake_device.other_process = 1024
            torch.zeros(3, device=fake_device.device)
            raise RuntimeError("a test that fails")

        def test_nothing_is_left():
            assert not torch.get_device_module("fakegpu").is_available()
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(failed=2, passed=1)


def test_torch_is_as_before_whatever_happened_to_the_test(pytester):
    pytester.makepyfile(
        """
        import pytest, torch
        from pytest_park.fakegpu import activate

        OWNERS = (torch, torch._C, torch.Tensor, torch._C.TensorBase, torch.UntypedStorage, torch.storage,
                  torch.nn.Module, torch.serialization, torch.accelerator, torch.random, torch.cuda, torch._tensor_str)
        CACHE = []

        def attributes():
            return {(owner, name): value for owner in OWNERS for name, value in vars(owner).items()}

        @pytest.fixture(scope="module")
        def before():
            with activate("64 MiB"):  # what torch makes on first use is not a change
                torch.ones(2, device="fakegpu").sum().item()
            return attributes()

        @pytest.fixture
        def fails_in_setup(fake_device):
            raise ValueError

        @pytest.fixture
        def fails_in_teardown(fake_device):
            yield
            raise ValueError

        def test_setup(before, fails_in_setup): pass
        def test_call(before, fake_device): raise ValueError
        def test_teardown(before, fails_in_teardown): pass
        def test_leak(before, fake_device): CACHE.append(torch.ones(3, device="fakegpu"))
        def test_exit(before, fake_device): raise SystemExit
        def test_good(before, fake_device):
            assert any(before.get(key) is not value for key, value in attributes().items())

        def test_after(before):
            after = attributes()
            assert [key for key in before.keys() | after.keys()
                    if key[1] != "__warningregistry__" and before.get(key) is not after.get(key)] == []
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=4, failed=2, errors=3)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 64 * MiB, "64 MiB", "1.5 GiB", 12 * GiB])
def test_headroom_of_the_fake_device_is_exact_to_the_byte(headroom, fake_device, size):
    from pytest_park import parse_size

    wanted = parse_size(size)
    assert headroom(size) == headroom.bytes == wanted
    assert fake_device.free == wanted
    assert fake_device.allocated == 0


@pytest.mark.parametrize("size", [0, 1, 1000, MiB, 19 * MiB, 100 * MiB + 1])
def test_headroom_counts_what_the_allocator_holds_without_use(headroom, fake_device, size):
    kept = [torch.empty(n, dtype=torch.uint8, device=fake_device.device) for n in (3 * MiB, 700, 5 * MiB, 30 * MiB)]
    del kept[2]  # leaves a gap between blocks that are in use, which the driver cannot have back
    assert headroom(size) == size
    assert fake_device.free + fake_device.reserved - fake_device.allocated == size


def test_headroom_is_what_park_core_measures(headroom, fake_device):
    park_core = pytest.importorskip("park_core")
    kept = torch.empty(5 * MiB, dtype=torch.uint8, device=fake_device.device)
    headroom("7 MiB")
    assert park_core.device_headroom(fake_device.device).bytes == headroom.bytes == 7 * MiB
    del kept
    assert park_core.device_headroom(fake_device.device).bytes == headroom.bytes == 12 * MiB


def test_headroom_respects_the_cap_of_the_process(headroom, fake_device):
    fake_device.set_cap("1 GiB")
    assert headroom.bytes == GiB
    assert headroom("64 MiB") == 64 * MiB
    with pytest.raises(ValueError, match="is more than"):
        headroom("2 GiB")


def test_a_second_call_replaces_the_first(headroom, fake_device):
    headroom("1 MiB")
    assert headroom("2 GiB") == 2 * GiB
    assert fake_device.other_process == 10 * GiB


def test_headroom_leaves_alone_what_another_process_held_before(headroom, fake_device):
    fake_device.other_process = "3 GiB"
    assert headroom.bytes == 9 * GiB
    headroom("1 GiB")
    headroom.undo()
    assert fake_device.other_process == 3 * GiB


def test_more_headroom_than_the_device_has_is_refused_with_numbers_and_changes_nothing(headroom, fake_device):
    fake_device.other_process = "2 GiB"
    with pytest.raises(ValueError, match=r"headroom\('11 GiB'\) is more than .* 10\.00 GiB .*--park-fake-memory"):
        headroom("11 GiB")
    assert headroom.bytes == 10 * GiB
    assert headroom("10 GiB") == 10 * GiB


@pytest.mark.parametrize("size", ["12 gigs", -1, None])
def test_a_headroom_that_is_no_size_is_refused(headroom, size):
    with pytest.raises(ValueError, match="is not a size"):
        headroom(size)


def test_a_headroom_that_an_allocation_uses_up_ends_in_out_of_memory(headroom, fake_device):
    headroom("20 MiB")
    kept = torch.empty(20 * MiB, dtype=torch.uint8, device=fake_device.device)
    assert headroom.bytes == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device=fake_device.device)
    del kept


def test_what_headroom_took_is_given_back_after_a_failed_test(pytester):
    pytester.makeconftest(
        """
        import pytest
        from pytest_park.fakegpu import activate

        @pytest.fixture(scope="session")
        def card():
            with activate(memory="64 MiB") as device:
                yield device

        @pytest.fixture
        def fake_device(card):
            return card
        """
    )
    pytester.makepyfile(
        """
        import torch

        def test_it(headroom, card):
            kept = torch.empty(700, dtype=torch.uint8, device=card.device)
            headroom(1000)
            raise RuntimeError("a test that fails")

        def test_afterwards(card):
            assert card.other_process == 0
            assert len(card.live_storages()) <= 1  # what the traceback of the failed test keeps alive
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(failed=1, passed=1)


def test_a_project_can_put_its_own_fixture_in_place_of_ours(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def park_device():
            return "mine"

        def test_it(park_device):
            assert park_device == "mine"
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
