"""Marks: registered, checked, and as good as asking for the fixture of their name."""

import pytest

STRICT = "[pytest]\nstrict = true\nfilterwarnings = error\n"


def test_all_marks_and_generated_ids_pass_the_strict_mode_of_a_user(pytester):
    pytester.makeini(STRICT)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.real_gpu(vendor="nvidia", count=2, memory="12 GiB")
        def test_real(): pass

        @pytest.mark.fake_device(memory="64 MiB", count=2)
        def test_fake(fake_device):
            assert fake_device.memory == 64 * 1024**2
            assert len(fake_device.devices) == 2

        @pytest.mark.headroom("1 MiB")
        def test_headroom(headroom):
            assert headroom.bytes == 1024**2
        """
    )
    result = pytester.runpytest_subprocess("-W", "error")
    result.assert_outcomes(passed=2, skipped=1)


def test_the_help_on_marks_has_all_three(pytester):
    pytester.runpytest("--markers").stdout.fnmatch_lines(
        ["@pytest.mark.real_gpu(*", "@pytest.mark.fake_device(*", "@pytest.mark.headroom(size)*"]
    )


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("real_gpu(vendor='nvdia')", "*test_it*vendor='nvdia' is not known: use one of nvidia, amd, intel, apple*"),
        ("real_gpu(count=0)", "*test_it*count=0 is not a number of devices*"),
        ("real_gpu(memory='12 gigs')", "*test_it*real_gpu: '12 gigs' is not a size*"),
        ("real_gpu('nvidia')", "*real_gpu(vendor=, count=, memory=), not with 'nvidia'*"),
        ("real_gpu(vender='amd')", "*not with vender*"),
        ("fake_device(memory='much')", "*fake_device: 'much' is not a size*"),
        ("fake_device(memory=0)", "*fake_device: a device without memory is of no use*"),
        ("fake_device(count='2')", "*fake_device: '2' is not a number of devices*"),
        ("fake_device(count=1000)", "*fake_device: 1000 is not a number of devices: give a number from 1 to 16*"),
        ("fake_device(size=3)", "*fake_device(memory=, count=, leaks=, expandable_segments=), not with size*"),
        ("fake_device(expandable_segments='on')", "*expandable_segments='on' is neither True nor False*"),
        ("headroom('64 megs')", "*headroom: '64 megs' is not a size*"),
        ("headroom", "*headroom(size), and needs size*"),
        ("headroom(1, 2)", "*headroom(size), not with 2*"),
    ],
)
def test_a_wrong_mark_is_an_error_of_its_test_that_says_what_is_valid(pytester, mark, says):
    pytester.makepyfile(f"import pytest\n\n@pytest.mark.{mark}\ndef test_it(): pass\n\ndef test_other(): pass\n")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*ERROR at setup of test_it*", says])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*During handling*")


def test_a_wrong_mark_is_told_by_workers_too(pytester):
    pytester.makepyfile("import pytest\n\n@pytest.mark.headroom\ndef test_it(): pass\n\ndef test_other(): pass\n")
    result = pytester.runpytest_subprocess("-n", "2", "--benchmark-disable")
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*headroom(size), and needs size*"])


def test_the_mark_of_one_parameter_is_not_a_mark_of_the_others(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("marked", [
            (),
            pytest.param(("fake_device",), marks=pytest.mark.fake_device(memory="5 MiB")),
            pytest.param(("headroom",), marks=pytest.mark.headroom("5 MiB")),
        ])
        def test_it(request, marked):
            assert {"fake_device", "headroom"}.intersection(request.node.fixturenames) == set(marked)
            import torch
            active = hasattr(torch, "fakegpu") and torch.fakegpu.is_available()
            assert active == bool(marked)
            assert not active or torch.fakegpu.mem_get_info()[0] == 5 * 1024**2
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=3)


@pytest.mark.fake_device(memory="3 MiB")
def test_a_mark_gives_the_fake_device_its_memory(fake_device):
    assert fake_device.memory == 3 * 1024**2


@pytest.mark.fake_device(count=3)
class TestAMarkOnAClass:
    def test_holds_for_its_tests(self, fake_device):
        assert len(fake_device.devices) == 3

    @pytest.mark.fake_device(count=2)
    def test_and_the_nearest_mark_wins(self, fake_device):
        assert len(fake_device.devices) == 2


@pytest.mark.fake_device(memory="5 MiB")
def test_a_mark_alone_makes_the_device_exist():
    import torch

    assert torch.get_device_module("fakegpu").mem_get_info() == (5 * 1024**2, 5 * 1024**2)


@pytest.fixture
def weights(park_device):
    import torch

    return torch.zeros(3 * 1024**2, dtype=torch.uint8, device=park_device.device)


@pytest.mark.headroom("10 MiB")
def test_headroom_of_a_mark_is_what_the_body_finds_whatever_fixtures_put_on_the_device(weights, headroom):
    assert headroom.bytes == 10 * 1024**2


@pytest.mark.headroom(12345)
def test_a_headroom_mark_needs_no_fixture_in_the_signature(weights, fake_device):
    assert fake_device.free + fake_device.reserved - fake_device.allocated == 12345


def test_a_headroom_mark_that_asks_for_too_much_is_an_error_with_numbers(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.headroom("13 GiB")
        def test_it(): pass
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ValueError: headroom('13 GiB') is more than *12.00 GiB*"])
