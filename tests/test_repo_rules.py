"""Rules of the repository that no single module can keep: layers, sizes, what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_optpipe"

#: Each layer, and what it may import of the package and of the heavy packages.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "core": ({"core", "units"}, set()),
    "planner": ({"core", "planner", "units"}, {"scipy", "numba"}),
    "runtime": ({"core", "runtime", "units"}, {"torch"}),
    "megatron": (
        {"core", "planner", "runtime", "megatron", "units"},
        {"scipy", "torch", "megatron"},
    ),
}
HEAVY = {"scipy", "numba", "torch", "megatron", "matplotlib"}

MAX_LINES = 450
MAX_EXECUTOR_LINES = 300

# Written so that this file does not hold what it looks for.
REGISTRY_HOSTS = re.compile(r"py[p]i\.org|pythonhost[e]d\.org|registry\.n[p]mjs|deb\.debi[a]n\.org")
MACHINE_PATHS = re.compile(r"/w[o]rk/(main|shared)|/ro[o]t/|/tmp/(bash_j[o]bs|ven[v])")


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository (new ones included), not what git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / line for line in done.stdout.splitlines()]
    return [file for file in files if file.is_file() and not file.is_symlink()]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, inside functions too, but not those for type checkers only."""
    tree = ast.parse(path.read_bytes())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_downwards_only(layer: str) -> None:
    allowed, heavy = LAYERS[layer]
    wrong = []
    for path in tracked(f"{PACKAGE}/{layer}/*.py"):
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] == PACKAGE:
                ok = parts[1] in allowed or parts[1] == "__version__"
            else:
                ok = parts[0] not in HEAVY - heavy
            if not ok:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("packages", "blocked"),
    [
        (("core",), ("scipy", "torch", "megatron", "numba", "matplotlib")),
        (("core", "planner"), ("torch", "megatron", "matplotlib", "numba")),
        (("cli",), ("scipy", "torch", "megatron", "matplotlib")),
        (("runtime",), ("megatron", "scipy")),
    ],
)
def test_layers_import_without_what_they_must_not_need(
    packages: tuple[str, ...], blocked: tuple[str, ...]
) -> None:
    code = f"""
import importlib, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None
for package in {packages!r}:
    found = importlib.import_module("{PACKAGE}." + package)
    for module in pkgutil.walk_packages(found.__path__, found.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_only_the_megatron_layer_asks_for_megatrons_arguments() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}"
        for path in tracked(f"{PACKAGE}/*.py")
        if f"{PACKAGE}/megatron/" not in path.as_posix() and "get_args()" in path.read_text()
    ]
    assert wrong == []


def test_no_file_is_too_long() -> None:
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in tracked(f"{PACKAGE}/*.py", "scripts/*.py")
    }
    too_long = {name: size for name, size in sizes.items() if size > MAX_LINES}
    assert too_long == {}
    assert sizes[f"{PACKAGE}/runtime/executor.py"] <= MAX_EXECUTOR_LINES


def test_files_are_ascii_and_hold_no_hosts_and_no_paths_of_a_machine() -> None:
    wrong = []
    for path in tracked():
        try:
            text = path.read_bytes().decode("ascii")
        except UnicodeDecodeError as error:
            wrong.append(f"{path.relative_to(ROOT)}: not ASCII at byte {error.start}")
            continue
        for pattern in (REGISTRY_HOSTS, MACHINE_PATHS):
            if found := pattern.search(text):
                wrong.append(f"{path.relative_to(ROOT)}: {found.group()}")
    assert wrong == []


def test_every_module_of_the_package_says_what_it_is_for() -> None:
    without = [
        path.relative_to(ROOT).as_posix()
        for path in tracked(f"{PACKAGE}/*.py")
        if ast.get_docstring(ast.parse(path.read_bytes())) is None
    ]
    assert without == []
