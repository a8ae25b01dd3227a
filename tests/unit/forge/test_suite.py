"""How `./inv test` spreads the tests: workers by cores and memory, and files that share something with one of them."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copy
from types import SimpleNamespace

import pytest

from forge import suite
from forge.memory import Machine
from sparkforge.errors import TestsFailedError
from sparkforge.paths import ROOT

GB = 10**9


@pytest.mark.parametrize(
    ("cores", "available", "wanted"),
    [(1, 64 * GB, 1), (2, 23 * GB, 2), (20, 119 * GB, 2), (4, 15 * GB, 1), (2, 1 * GB, 1)],
)
def test_workers_come_from_cores_and_memory(cores, available, wanted):
    assert suite.workers(Machine(available, cores)) == wanted


@pytest.fixture
def started(monkeypatch):
    """Note what would be started in place of an environment's interpreter; `code` is what it would end with."""
    told = SimpleNamespace(code=0)

    def call(command, *, cwd, env):
        told.words, told.env = command[1:], env
        return told.code

    monkeypatch.setattr(suite.embedded, "prepare", lambda *_: SimpleNamespace(python=sys.executable))
    monkeypatch.setattr(suite, "call", call)
    monkeypatch.setattr(suite.memory, "measure", lambda: Machine(64 * GB, 2))
    return told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["tests", "--durations=15", "--numprocesses=2"]),
        ({"fast": True}, ["tests/unit", "--numprocesses=2"]),
        ({"select": "ctrl"}, ["tests", "--durations=15", "-k", "ctrl"]),
    ],
    ids=str,
)
def test_what_pytest_is_told(started, options, words):
    suite.run_tests(**{"fast": False, "select": "", **options})
    assert started.words == ["-m", "pytest", *words]
    assert started.env.get("OMP_NUM_THREADS") == (None if "select" in options else "1")


def test_one_core_gets_no_workers_and_a_failure_is_an_error(started, monkeypatch):
    monkeypatch.setattr(suite.memory, "measure", lambda: Machine(64 * GB, 1))
    started.code = 1
    with pytest.raises(TestsFailedError, match="ended with code 1"):
        suite.run_tests(fast=True, select="")
    assert started.words == ["-m", "pytest", "tests/unit"]


NOTES = """
import os, pathlib, time, pytest
@pytest.mark.parametrize("n", range(3))
def test_it(n, request):
    file = request.node.nodeid.split("::")[0]
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{os.environ['PYTEST_XDIST_WORKER']} {file}\\n")
    time.sleep(0.1)
"""
FILES = [  # in the order in which one worker would take them
    "integration/test_bench.py", "integration/test_road.py", "engine/test_x.py", "integration/test_audit.py",
    "integration/test_kernels.py", "integration/test_sources.py", "unit/test_a.py", "unit/test_b.py",
]  # fmt: skip


def test_what_shares_a_server_or_the_compilers_stays_with_one_worker_and_comes_first(tmp_path):
    for name in FILES:
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(NOTES + "pytestmark = pytest.mark.integration\n" * name.startswith("integration/"))
    copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    copy(ROOT / "pyproject.toml", tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NOTES": str(tmp_path / "notes")}
    command = [sys.executable, "-m", "pytest", "--numprocesses=2", "tests"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {3 * len(FILES)} passed" in done.stdout.splitlines()[-1]
    notes = [line.split() for line in Path(env["NOTES"]).read_text().splitlines()]
    of = {name: {worker for worker, file in notes if file == f"tests/{name}"} for name in FILES}
    assert all(len(workers) == 1 for workers in of.values()), "a file stays with one worker"
    assert of["engine/test_x.py"] == of["integration/test_bench.py"] == of["integration/test_road.py"]
    assert of["integration/test_audit.py"] == of["integration/test_kernels.py"] != of["integration/test_road.py"]
    ranks = [[FILES.index(file.partition("/")[2]) for by, file in notes if by == worker] for worker in ("gw0", "gw1")]
    assert ranks == [sorted(each) for each in ranks]
    assert {each[0] for each in ranks} == {0, 3}, "each worker begins with one of the two long kinds"
