"""A run that uses nothing of ours says and does what it would without us."""

import re

SUITE = """
import pytest, sys, unittest

@pytest.fixture(scope="module", params=["left", "right"])
def side(request):
    print("set up", request.param)
    yield request.param
    print("torn down", request.param)

@pytest.fixture(autouse=True)
def always(): yield

def test_passes(side): pass
def test_fails(side): assert side == "left"
@pytest.mark.skip(reason="rain")
def test_skipped(): pass
@pytest.mark.xfail(strict=True)
def test_expected(): raise RuntimeError("as expected")
@pytest.mark.parametrize("number", [1, 2])
def test_raises(number): [].index(number)

@pytest.fixture
def broken(): raise OSError("in setup")
def test_error(broken): pass

class TestCases(unittest.TestCase):
    def test_it(self): self.assertEqual(1, 2)

def test_what_is_loaded(request):
    assert "torch" not in sys.modules
    assert [name for name in request.fixturenames if "park" in name or "headroom" in name] == []
"""


def told(pytester, *options):
    result = pytester.runpytest_subprocess("-v", "-rA", "--setup-show", "-p", "no:cacheprovider", *options)
    text = re.sub(r"0x[0-9a-f]+|in \d+\.\d+s|, parking-[\d.]+|parking-[\d.]+, ", "", result.stdout.str())
    return result.ret, text, result.stderr.str()


def test_output_and_exit_code_are_those_of_a_run_without_the_plugin(pytester):
    pytester.makepyfile(SUITE)
    ours = told(pytester)
    assert "::test_what_is_loaded\n" in ours[1].partition("short test summary info")[2].partition("SKIPPED")[0]
    assert ours == told(pytester, "-p", "no:park")
