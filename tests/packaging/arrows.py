"""Which part of the repository may import which, and who breaks that. Reads sources; imports none of them."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    """Files below ``room`` may import the standard library, themselves, and what ``may_import`` lists.

    A name stands for the module and everything below it.
    """

    room: str
    may_import: tuple[str, ...]


RULES = (
    # The reference stands alone.
    Rule("park_core", ("torch", "psutil", "safetensors")),
    # The fake is usable without pytest and knows nothing of parking.
    Rule("pytest_park/fakegpu", ("torch", "pytest_park.sizes")),
    # Its command runs the checks without pytest, so like the plugin's fixtures it brings a device.
    Rule(
        "pytest_park/contract/__main__.py",
        ("torch", "pytest_park.contract", "pytest_park.fakegpu", "pytest_park.sizes"),
    ),
    # The contract also tests implementations that do not use park_core, so it must not lean on it.
    Rule("pytest_park/contract", ("torch", "pytest", "hypothesis")),
    # The rest of the plugin may use all of the above, except that only benchmarks know park_core.
    Rule("pytest_park/benchmarks", ("torch", "pytest", "park_core", "pytest_park.sizes")),
    Rule("pytest_park", ("torch", "pytest", "pytest_benchmark")),
)
# Loaded in every pytest run of an environment that we are installed in, so nothing heavy may come with them.
LIGHT = [
    "__init__",
    "plugin",
    "options",
    "marks",
    "selection",
    "fixtures",
    "leaks",
    "hookspecs",
    "workers",
    "reporting",
    "sizes",
    "tracebacks",
]
HEAVY = ("torch", "park_core", "numpy", "pytest_benchmark", "pytest_park.fakegpu", "pytest_park.contract")


def broken_arrows(root: Path) -> list[str]:
    """Every import below ``root`` that a rule forbids, as ``file:line: why``."""
    problems = []
    for path in sorted(p for package in ("park_core", "pytest_park") for p in (root / package).rglob("*.py")):
        file = path.relative_to(root)
        rule = next(rule for rule in RULES if file.is_relative_to(rule.room))
        own = rule.room.replace("/", ".")
        for line, name, on_load in imports(path, root):
            allowed = _below(name, own) or any(_below(name, module) for module in rule.may_import)
            if not allowed and name.split(".")[0] not in sys.stdlib_module_names:
                problems.append(f"{file}:{line}: {rule.room} must not import {name}")
            light = file.parent == Path("pytest_park") and file.stem in LIGHT
            if light and on_load and any(_below(name, module) for module in HEAVY):
                problems.append(f"{file}:{line}: loading the plugin must not import {name}: import it where it is used")
    return problems


def imports(path: Path, root: Path) -> list[tuple[int, str, bool]]:
    """(line, absolute module name, whether it happens on loading) of each import that is not for type checkers only."""
    package = path.relative_to(root).parent.parts
    found = []

    def visit(node: ast.AST, on_load: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name, on_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = [*parents, *filter(None, [node.module])]
            found.extend((node.lineno, ".".join([*base, alias.name]), on_load) for alias in node.names)
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, on_load and not inside_function)

    visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)), True)
    return found


def _below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")
