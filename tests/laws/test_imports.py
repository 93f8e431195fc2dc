"""The tree's own law: imports go down the list only, and policy never sees torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "milepost"
ORDER = ["cli", "server", "text", "engine", "state", "models", "kernels"]
ANYWHERE = {"errors", "config", "request", "clock", "embedded", "__init__"}
BESIDE_THE_PATH = {"plan", "sim", "bench"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WITHOUT_TORCH = [
    "milepost.engine.scheduler",
    "milepost.engine.settings",
    "milepost.state.prefix",
    "milepost.state.store",
    "milepost.state.placement",
    "milepost.state.retention",
    "milepost.state.layout",
    "milepost.plan.sizes",
    "milepost.plan.memory",
    "milepost.plan.plan",
    "milepost.state.codecs",
    "milepost.models.sharding",
    "milepost.models.nemotron_h",
    "milepost.text.tokenizer",
]


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _ours(file: Path) -> set[str]:
    """Top-level names of this package that a file imports."""
    return {name.split(".")[1] for name in _imports(file) if name.startswith("milepost.")}


@pytest.mark.parametrize("package", ORDER[1:])
def test_imports_go_down_only(package: str) -> None:
    allowed = {"server": {"text", "engine"}, "text": set()}.get(package, set(ORDER[ORDER.index(package) :])) | {package}
    for file in (SOURCE / package).rglob("*.py"):
        above = _ours(file) - allowed - ANYWHERE - {"__version__"}
        assert not above, f"{file.relative_to(SOURCE)} imports {above}"


def test_kernels_import_nothing_of_ours() -> None:
    for file in (SOURCE / "kernels").rglob("*.py"):
        assert _ours(file) <= {"kernels"}, file


def test_policy_and_planning_run_without_torch() -> None:
    """In a fresh interpreter: importing them loads no torch, so a simulator need not have it."""
    code = f"import sys\nfor name in {WITHOUT_TORCH!r}:\n    __import__(name)\nprint('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_transformers_is_imported_inside_functions_of_the_parity_bench_alone() -> None:
    found = []
    for file in SOURCE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        inner = {id(node) for outer in ast.walk(tree) if isinstance(outer, FUNCTIONS) for node in ast.walk(outer)}
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "transformers" for name in names):
                found.append((file.relative_to(SOURCE).parts[:2], id(node) in inner))
    assert found == [(("bench", "parity"), True)]


def test_importing_the_parity_bench_loads_no_transformers() -> None:
    names = [".".join(file.relative_to(SOURCE.parent).with_suffix("").parts) for file in SOURCE.glob("bench/parity/*.py")]
    code = f"import sys\nfor name in {names!r}:\n    __import__(name)\nprint('transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False" and len(names) > 5


def test_only_the_command_line_imports_benches() -> None:
    for file in SOURCE.rglob("*.py"):
        assert "bench" not in _ours(file) or file.parent.name == "cli" or file.is_relative_to(SOURCE / "bench"), file


def test_no_file_is_too_long() -> None:
    """A budget that hurts a little: 400 lines a file, 300 for scheduler and prefix tree, 12,000 not blank on a request's path.

    What stands beside the path (plan, sim, bench) isn't counted.
    """
    lines = {file: len(file.read_text().splitlines()) for file in SOURCE.rglob("*.py")}
    path = [file for file in lines if file.relative_to(SOURCE).parts[0] not in BESIDE_THE_PATH]
    written = sum(bool(line.strip()) for file in path for line in file.read_text().splitlines())
    assert max(lines.values()) <= 400, max(lines, key=lambda file: lines[file])
    assert lines[SOURCE / "engine" / "scheduler.py"] <= 300
    assert lines[SOURCE / "state" / "prefix.py"] <= 300
    assert written < 12_000
