"""Memory of a fake device that outlives its test is an error of that test, with the name of who holds it."""

import pytest

from pytest_park.fakegpu import activate

HEADER = "import functools, gc, logging, pytest, threading, time, torch\n"


@pytest.fixture(scope="module", autouse=True)
def _torch_is_loaded():
    """Runs within this process forget all modules that were first loaded in them, and torch can be loaded only once."""
    with activate("1 MiB"):
        pass


def outcomes(pytester, body, *options):
    pytester.makepyfile(HEADER + body)
    # No summary: where the variable CI is set, pytest writes each message in full there, a second time.
    return pytester.runpytest_inprocess("-rN", *options)


def test_what_outlives_a_test_is_an_error_of_its_teardown_that_names_the_holder(pytester):
    result = outcomes(
        pytester,
        """
CACHE = {}

class Encoder:
    cached = None

@functools.lru_cache
def table(size):
    return torch.ones(size, device="fakegpu")

end = threading.Event()

def courier(started):
    staged = torch.ones(150, device="fakegpu")
    started.set()
    end.wait()
    del staged

def test_cache(fake_device):
    CACHE["key"] = torch.ones(100, device="fakegpu")

def test_module(fake_device):
    CACHE["list"] = [torch.nn.Linear(110, 1, bias=False, device="fakegpu")]

def test_class(fake_device):
    Encoder.cached = torch.ones(120, device="fakegpu")[:1]

def test_function(fake_device):
    table(130)

def test_thread(fake_device):
    started = threading.Event()
    threading.Thread(target=courier, args=[started], name="courier", daemon=True).start()
    started.wait()

def test_graph(fake_device):
    CACHE["graph"] = torch.ones(140, device="fakegpu", requires_grad=True).sin().sum().cpu()

def test_nothing(fake_device):
    assert fake_device.allocated == 0
    assert torch.ones(3, device="fakegpu").sum() == 3

def test_torch_is_as_before():
    assert not torch.fakegpu.is_available()
    assert torch.empty is torch._C._VariableFunctions.empty
    end.set()
""",
    )
    result.assert_outcomes(passed=8, errors=6)
    report = result.stdout.str()
    for test, size, holder in [
        ("cache", 400, "CACHE['key'] of module "),
        ("module", 440, "CACHE['list'][0].weight of module "),
        ("class", 480, "cached of class Encoder"),
        ("function", 520, "the cache of table()"),
        ("thread", 600, "staged of courier() in thread 'courier'"),
        ("graph", 560, "nobody that Python can name (autograd"),
    ]:
        assert f"ERROR at teardown of test_{test}" in report
        assert f"{size} B of fakegpu:0 ({size} bytes; 0 before the test) outlive the test" in report
        assert f"{size} B held by {holder}" in report
    assert report.count('leaks="allow"') == 6


def test_what_goes_away_with_the_test_is_no_leak(pytester):
    pytester.makepyfile(
        HEADER
        + """
@pytest.fixture
def model(fake_device):
    return torch.nn.Linear(250, 4, device="fakegpu")

@pytest.fixture
def wrapped(model):
    return [model]

def test_values_of_fixtures(wrapped, model):
    assert model(torch.ones(250, device="fakegpu")).shape == (4,)

@pytest.fixture
def used_at_its_end(fake_device):
    model = torch.nn.Linear(250, 4, device="fakegpu")
    yield model
    assert model.weight.sum().isfinite()

def test_a_fixture_that_needs_the_device_at_its_end(used_at_its_end): pass

def test_a_reference_cycle(fake_device):
    cycle = [torch.ones(250, device="fakegpu")]
    cycle.append(cycle)
    gc.collect()  # it is old now

def soon_over(started):
    cycle = [torch.ones(250, device="fakegpu")]
    cycle.append(cycle)
    started.set()
    time.sleep(0.1)

def test_a_reference_cycle_of_a_thread_that_lets_go_a_little_later(fake_device):
    started = threading.Event()
    threading.Thread(target=soon_over, args=[started]).start()
    started.wait()

def test_an_exception_that_was_expected(fake_device):
    weight = torch.ones(250, device="fakegpu")
    with pytest.raises(RuntimeError) as caught:
        weight + torch.ones(250)
    assert caught

@pytest.mark.parametrize("error", [MemoryError("as asked")])
def test_an_exception_among_the_parameters(fake_device, error):
    weight = torch.ones(250, device="fakegpu")
    fake_device.fail_host_copy(error=error)
    with pytest.raises(MemoryError):
        weight.cpu()

class TestEncoder:
    def test_an_attribute_of_the_instance(self, fake_device):
        self.model = torch.nn.Linear(250, 4, device="fakegpu")

def test_a_record_of_the_log(fake_device, caplog):
    logging.getLogger().error("%s", torch.ones(250, device="fakegpu"))
    assert len(caplog.records) == 1

def test_a_race_that_was_found(fake_device):
    weight = torch.ones(250, device="fakegpu")
    with torch.Stream(device="fakegpu"), pytest.raises(RuntimeError):
        weight + 1

CACHE = []

@pytest.fixture
def cleaned():
    yield
    CACHE.clear()

def test_what_a_teardown_takes_away(cleaned, fake_device):
    CACHE.append(torch.ones(250, device="fakegpu"))

@pytest.mark.headroom("1 MiB")
def test_the_ballast_of_headroom(park_device): pass
"""
    )
    # in a process of its own, because the run around this one would keep the records of the log, too
    pytester.runpytest_subprocess().assert_outcomes(passed=11)


def test_a_test_that_did_not_pass_is_not_blamed_for_what_its_traceback_keeps(pytester):
    body = """
@pytest.mark.parametrize("end", [ValueError, pytest.skip, pytest.xfail])
def test_it(fake_device, end):
    weight = torch.ones(250, device="fakegpu")
    raise end("here")
"""
    outcomes(pytester, body).assert_outcomes(failed=1, skipped=1, xfailed=1)


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="pytest has subtests since 9.0")
def test_nor_is_a_test_of_which_a_subtest_did_not_pass(pytester):
    body = """
def test_it(fake_device, subtests):
    for size in (100, 200, 300):
        with subtests.test(size=size):
            weight = torch.ones(size, device="fakegpu")
            assert size != 200
        del weight
"""
    outcomes(pytester, body).assert_outcomes(failed=2)


LEAKS = """
CACHE = []

%s
def test_it(fake_device):
    CACHE.append(torch.ones(250, device="fakegpu"))
"""


@pytest.mark.parametrize(
    ("mark", "options", "errors"),
    [
        ("@pytest.mark.fake_device(leaks='allow')", [], 0),
        ("", ["--park-fake-leaks=allow"], 0),
        ("", ["-o", "park_fake_leaks=allow"], 0),
        ("", ["-o", "park_fake_leaks=allow", "--park-fake-leaks=error"], 1),
        ("@pytest.mark.fake_device(leaks='error')", ["--park-fake-leaks=allow"], 1),
    ],
    ids=["mark", "option", "ini", "option over ini", "mark over option"],
)
def test_memory_that_is_meant_to_stay_can_be_allowed(pytester, mark, options, errors):
    outcomes(pytester, LEAKS % mark, *options).assert_outcomes(passed=1, errors=errors)


def test_the_devices_are_told_apart_and_a_long_list_is_cut(pytester):
    body = """
CACHE = []

@pytest.mark.fake_device(count=2)
def test_it(fake_device):
    CACHE.extend(torch.ones(100 + n, device="fakegpu:1") for n in range(12))
"""
    result = outcomes(pytester, body)
    result.assert_outcomes(passed=1, errors=1)
    report = result.stdout.str()
    assert "of fakegpu:1 (5064 bytes" in report
    assert "fakegpu:0" not in report
    assert "and 2 more storages" in report


@pytest.mark.parametrize("options", [["--park-fake-leaks=no"], ["-o", "park_fake_leaks=no"]], ids=["option", "ini"])
def test_a_setting_that_is_none_is_refused(pytester, options):
    result = outcomes(pytester, LEAKS % "", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "'no' does not say what leaks are: use 'error' or 'allow'" in result.stderr.str()


def test_a_mark_that_makes_no_sense_is_refused(pytester):
    result = outcomes(pytester, LEAKS % "@pytest.mark.fake_device(leaks=False)")
    result.assert_outcomes(errors=1)
    assert "test_it: @pytest.mark.fake_device: False does not say what leaks are" in result.stdout.str()
