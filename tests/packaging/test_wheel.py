"""What is released is what was meant to be: tests read the wheel and the sdist, not the checkout."""

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def built(kind, folder):
    build = f"import sys; from hatchling.build import build_{kind} as build; build(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def files(wheel):
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_bytes(zipfile.ZipFile(wheel).read("pytest_parking-0.1.0.dist-info/METADATA"))


@pytest.mark.parametrize("package", ["park_core", "pytest_park"])
def test_the_wheel_has_all_modules_of_the_package_and_says_that_they_are_typed(files, package):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
    assert modules <= files
    assert f"{package}/py.typed" in files


def test_the_wheel_has_nothing_else_but_its_metadata(files):
    assert {name.split("/")[0] for name in files} == {"park_core", "pytest_park", "pytest_parking-0.1.0.dist-info"}
    assert not [name for name in files if "__pycache__" in name]


def test_the_sdist_has_all_that_the_tests_need(tmp_path):
    """They can then be run from it. Its files are those of the checkout, and none that only a run has made."""
    with tarfile.open(built("sdist", tmp_path)) as sdist:
        files = {name.split("/", 1)[1] for name in sdist.getnames()}
    folders = ("park_core", "pytest_park", "tests", "examples", "patients", "docs", ".ci")
    there = {path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    top = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "conftest.py", "pyproject.toml", "tox.ini"}
    assert files == top | {str(path) for path in there if "__pycache__" not in path.parts}


def test_the_licence_comes_along(files, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "pytest_parking-0.1.0.dist-info/licenses/LICENSE" in files


def test_pytest_finds_the_plugin_under_the_name_park(wheel):
    text = zipfile.ZipFile(wheel).read("pytest_parking-0.1.0.dist-info/entry_points.txt").decode()
    assert "".join(text.split()) == "[pytest11]park=pytest_park.plugin"


def test_the_wheel_needs_what_it_imports_and_nothing_more(metadata):
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(needed) == ["psutil>=5.9", "pytest-benchmark>=5.1", "pytest>=8.4", "torch>=2.10"]
    assert set(metadata.get_all("Provides-Extra")) == {"demo", "test"}


def test_the_plugin_works_from_the_wheel(wheel, tmp_path):
    """In a process that does not see the checkout: the wheel comes first on its path."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "test_it.py").write_text(
        "import pytest_park, park_core, torch\n\n"
        "def test_it(park_device, headroom):\n"
        "    assert 'installed' in pytest_park.__file__ and 'installed' in park_core.__file__\n"
        "    headroom('1 MiB')\n"
        "    assert park_core.device_headroom(park_device.device).bytes == 2**20\n"
    )
    code = "import sys; sys.path.insert(0, 'installed'); import pytest; sys.exit(pytest.main(['-q', 'test_it.py']))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
