"""The arrows between the parts of the repository point one way."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.arrows import broken_arrows

ROOT = Path(__file__).parents[2]


def test_no_import_goes_against_the_arrows():
    assert broken_arrows(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("park_core/parking.py", "import pytest"),
        ("park_core/parking.py", "from pytest_park.sizes import MiB"),
        ("park_core/parking.py", "def park():\n    from pytest_park import fakegpu"),
        ("park_core/deep/inside.py", "import pytest_park.fakegpu"),
        ("pytest_park/fakegpu/device.py", "import park_core"),
        ("pytest_park/fakegpu/device.py", "import pytest"),
        ("pytest_park/fakegpu/device.py", "from ..fixtures import fake_device"),
        ("pytest_park/contract/checks.py", "from park_core import Parking"),
        ("pytest_park/contract/checks.py", "from pytest_park.fakegpu import activate"),
        ("pytest_park/fixtures.py", "def headroom():\n    import park_core"),
        ("pytest_park/plugin.py", "import torch"),
        ("pytest_park/plugin.py", "from pytest_park.fakegpu import FakeDevice"),
        ("pytest_park/plugin.py", "from . import contract"),
        ("pytest_park/reporting.py", "class A:\n    import torch"),
    ],
)
def test_an_import_against_the_arrows_is_found(tmp_path, file, source):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    (problem,) = broken_arrows(tmp_path)
    assert problem.startswith(f"{file}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("park_core/parking.py", "import os, torch.nn\nfrom park_core.errors import ParkError\nfrom . import memory"),
        ("pytest_park/fakegpu/device.py", "from pytest_park.sizes import MiB\nfrom .active import cards"),
        ("pytest_park/contract/subclass.py", "import pytest\nfrom .parkable import Parkable"),
        ("pytest_park/plugin.py", "if TYPE_CHECKING:\n    import torch"),
        ("pytest_park/fixtures.py", "def fake_device():\n    from pytest_park.fakegpu import activate"),
    ],
)
def test_an_import_along_the_arrows_is_not(tmp_path, file, source):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert broken_arrows(tmp_path) == []


def python(*arguments, cwd):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_loading_the_plugin_does_not_import_torch(tmp_path):
    code = "import sys, pytest_park.plugin; print(sorted({'torch', 'numpy', 'park_core'} & set(sys.modules)))"
    result = python("-c", code, cwd=tmp_path)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_run_that_does_not_use_our_fixtures_does_not_import_torch(tmp_path):
    (tmp_path / "test_other.py").write_text("import sys\n\ndef test_it(): assert 'torch' not in sys.modules\n")
    result = python("-m", "pytest", "-q", "-p", "no:hypothesispytest", "-W", "error", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
