"""What a reviewer should not have to say: the linters, the sizes, and which room may import which."""

import ast
import statistics
import subprocess
import sys

import pytest

from sparkforge.paths import ROOT

ROOMS = {
    "sparkforge": set(),
    "forge": {"sparkforge"},
    "spark_mxfp4": set(),
    "serve": {"sparkforge", "validate"},
    "validate": {"sparkforge", "spark_mxfp4"},
    "bench": {"sparkforge", "forge", "serve"},  # bench.image builds and serves one; the experts it never sees
}
ALSO = {"training": {"spark_mxfp4"}}  # serve/training makes MXFP4 weights; what serves only copies bytes
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MODULE_LINES, FUNCTION_LINES, MEDIAN_LINES, TASKS_LINES = 400, 80, 12, 200


def functions():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_linter_is_content(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_modules_and_functions_stay_small():
    assert not [path for path in SOURCES if len(path.read_text(encoding="utf-8").splitlines()) > MODULE_LINES]
    assert not [found for found in functions() if found[2] > FUNCTION_LINES]
    assert statistics.median(lines for _, _, lines in functions()) <= MEDIAN_LINES
    assert len((ROOT / "tasks.py").read_text(encoding="utf-8").splitlines()) <= TASKS_LINES


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_downwards(room):
    for path in (ROOT / room).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        other_rooms = {module.partition(".")[0] for module in modules} & (ROOMS.keys() - {room})
        assert other_rooms <= ROOMS[room] | ALSO.get(path.parent.name, set()), path


def test_no_assert_outside_tests():
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], f"{path}: python -O drops asserts"
