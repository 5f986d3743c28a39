"""Every snippet of the README, and of the page on the fake device, is run as the file of a project that it stands for.

A collector of our own, because the snippets are test files: sybil and pytest-examples execute a block as a script,
which would define the tests in it and run none of them.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"README.md": README, "fakegpu.md": (ROOT / "docs" / "fakegpu.md").read_text(encoding="utf-8")}
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def blocks(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


SNIPPETS = {
    f"{page} {number}": snippet
    for page, text in PAGES.items()
    for number, snippet in enumerate(blocks("python", text), 1)
}
COMMANDS = [line for block in blocks("bash", README) for line in block.splitlines()]
INSTALL = "python3 -m venv .venv && .venv/bin/pip install tox && .venv/bin/tox"


def run_pytest(*arguments, cwd):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments]
    # Workers of xdist say so in their environment; pytest-benchmark in the inner run would believe to be in one, too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("place", SNIPPETS)
def test_a_python_snippet_passes_as_a_test_file_of_a_strict_project(tmp_path, place):
    (tmp_path / "pytest.ini").write_text("[pytest]\nstrict = true\nfilterwarnings = error\n")
    (tmp_path / "test_snippet.py").write_text(SNIPPETS[place])
    # All promises are tested over park_core in tests/contract; here the question is whether the snippet works.
    some = ["-k", "c01 or c05 or c20"] if "ParkableContract" in SNIPPETS[place] else []
    result = run_pytest("-q", "test_snippet.py", *some, cwd=tmp_path)
    assert result.returncode == pytest.ExitCode.OK, result.stdout + result.stderr


def test_no_snippet_is_in_a_language_that_is_not_run():
    assert set(re.findall(r"^```(\S+)$", README, flags=re.MULTILINE)) == {"python", "bash"}
    assert {place.split()[0] for place in SNIPPETS} == set(PAGES)


def test_what_is_linked_to_is_there():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("pytest ")])
def test_a_pytest_command_is_understood(tmp_path, command):
    """Collection only: what the tests and benchmarks do is tested elsewhere. A GPU cannot be promised here."""
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    arguments = [argument for argument in command.split()[1:] if argument != "--real-gpu"]
    result = run_pytest("--collect-only", "-q", *arguments, cwd=tmp_path)
    assert result.returncode == pytest.ExitCode.OK, result.stdout + result.stderr


def test_the_two_commands_stand_alone_and_nothing_else_is_to_be_pasted():
    rest = [line for line in COMMANDS if not line.startswith("pytest ")]
    assert rest == [f"{INSTALL} -e demo", INSTALL]


@pytest.mark.parametrize("ending", ["tox", "tox -e demo"])
def test_ci_takes_the_two_commands_from_the_readme(ending):
    assert f"readme_command '{ending}'" in CI
    assert 'grep -E "^python3 -m venv .*/$1\\$" README.md' in CI
    assert len(re.findall(rf"^python3 -m venv .*/{ending}$", README, flags=re.MULTILINE)) == 1


def tox_environments():
    """The names in the section headers of tox.ini, with ``{a,b}`` written out."""
    names = set()
    for header in re.findall(r"^\[testenv:(.*)\]$", (ROOT / "tox.ini").read_text(encoding="utf-8"), flags=re.MULTILINE):
        parts = [part.split(",") for part in re.split(r"[{}]", header)]
        names |= {"".join(choice) for choice in itertools.product(*parts)}
    return names


def test_the_environments_that_the_readme_names_exist():
    named = set(re.findall(r"tox -e ([\w-]+)", README))
    assert named
    assert named <= tox_environments()


def test_the_matrix_is_that_of_python_versions_and_back_ends():
    assert {
        "py311-cpu",
        "py312-cpu",
        "py313-cpu",
        "py311-cuda",
        "py311-rocm",
        "lint",
        "type",
        "demo",
    } <= tox_environments()


def test_a_device_has_all_that_the_readme_says_of_it():
    from pytest_park.fakegpu import activate

    tables = README[README.index("| fixture |") : README.index("As on CUDA, 4 bytes")]
    named = re.findall(r"`\.(\w+)", tables)
    assert len(named) > 20
    with activate("1 MiB") as device:
        assert [name for name in named if not hasattr(device, name)] == []


def test_the_readme_names_every_fixture_mark_option_and_hook():
    from pytest_park import hookspecs, marks, plugin

    hooks = [name for name in vars(hookspecs) if name.startswith("pytest_park_")]
    named = [*plugin.__all__, *(line.split("(")[0] for line in marks.HELP), *hooks]
    options = re.findall(r'"(--[\w-]+)"', (ROOT / "pytest_park" / "options.py").read_text(encoding="utf-8"))
    assert options
    assert [name for name in [*named, *options] if f"`{name}" not in README] == []
