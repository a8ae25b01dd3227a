"""How `./inv test` spreads the tests: workers by cores and memory, and files that share something with one of them."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copy
from types import SimpleNamespace

import pytest
from invoke.context import Context
from invoke.exceptions import Exit

from sparkforge.cli import maintain, suite
from sparkforge.core import paths
from sparkforge.core.errors import ProcessError, UsageError
from sparkforge.core.memory import Machine
from sparkforge.core.paths import ROOT

GB = 10**9
FAST = ("-m", "not slow", "--dist=worksteal")


@pytest.mark.parametrize(
    ("cores", "available", "wanted"),
    [(1, 64 * GB, 1), (2, 23 * GB, 2), (20, 119 * GB, 2), (4, 15 * GB, 1), (2, 1 * GB, 1)],
)
def test_workers_come_from_cores_and_memory(cores, available, wanted):
    assert suite.workers_for(Machine(available, cores)) == wanted


@pytest.fixture
def started(monkeypatch):
    """Note what would be started in place of an environment's interpreter; `code` is what it would end with."""
    seen = SimpleNamespace(code=0)

    def call(command, *, cwd, env):
        seen.python, seen.arguments, seen.env = command[0], command[1:], env
        return seen.code

    monkeypatch.setattr(suite, "prepare_environment", lambda *_: SimpleNamespace(python="all"))
    monkeypatch.setattr(suite.environments, "ensure", lambda *_: True)
    monkeypatch.setattr(suite.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(suite, "call", call)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(suite.memory, "measure", lambda: Machine(64 * GB, 2))
    return seen


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, ["tests", "--durations=15", "-m", "not nightly", "--numprocesses=2"]),
        ({"nightly": True}, ["tests", "--durations=15", "--numprocesses=2"]),
        ({"fast": True}, ["tests/unit", *FAST, "--numprocesses=4"]),
        ({"select": "ctrl"}, ["tests", "--durations=15", "-k", "ctrl"]),
        ({"fast": True, "coverage": True}, ["tests/unit", *FAST, "--numprocesses=4", *suite.COVERAGE]),
        ({"fast": True, "select": "ctrl"}, ["tests/unit", "-k", "ctrl"]),
    ],
    ids=str,
)
def test_what_pytest_is_seen(started, options, arguments):
    suite.run_tests(**{"fast": False, "select": "", **options})
    assert started.arguments == ["-m", "pytest", *arguments]
    assert started.env.get("OMP_NUM_THREADS") == (None if "select" in options else "1")
    assert (started.python, suite.FAST in started.env) == (
        (suite.UNIT.python, True) if "fast" in options else ("all", False)
    )


def test_on_ci_a_failed_test_runs_once_more(started, monkeypatch):
    monkeypatch.setenv("CI", "true")
    suite.run_tests(fast=False, select="")
    assert started.arguments[-2:] == [*suite.RERUNS]
    suite.run_tests(fast=True, select="")
    assert not set(suite.RERUNS) & set(started.arguments)


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (20, 8)])
def test_fast_has_two_workers_a_core_up_to_a_limit(started, monkeypatch, cores, workers):
    monkeypatch.setattr(suite.os, "cpu_count", lambda: cores)
    suite.run_tests(fast=True, select="")
    assert started.arguments == ["-m", "pytest", "tests/unit", *FAST, f"--numprocesses={workers}"]


def test_one_core_gets_no_workers_and_a_failure_is_an_error(started, monkeypatch):
    monkeypatch.setattr(suite.memory, "measure", lambda: Machine(64 * GB, 1))
    started.code = 1
    with pytest.raises(ProcessError, match="ended with code 1", check=lambda error: error.code == "process.tests"):
        suite.run_tests(fast=False, select="")
    assert not any(argument.startswith("--numprocesses") for argument in started.arguments)


def test_the_long_attack_writes_its_counts_and_a_broken_promise_is_an_error(started):
    suite.run_robustness(minutes=7)
    *arguments, output = started.arguments
    assert arguments == ["-m", "robustness.campaign", "--minutes", "7", "--output"]
    assert output.is_relative_to(paths.state())
    assert started.env["PYTHONPATH"] == str(ROOT / "tests")
    started.code = 1
    with pytest.raises(ProcessError, match="the counts are in", check=lambda error: error.code == "process.tests"):
        suite.run_robustness(minutes=1)


@pytest.mark.parametrize(
    "options",
    [{"minutes": "5"}, {"all_": True, "fast": True}, {"all_": True, "robustness": True},
     {"robustness": True, "fast": True}, {"robustness": True, "select": "x"},
     {"robustness": True, "minutes": "0"}, {"robustness": True, "minutes": "ten"}],
    ids=str,
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(started, options):
    with pytest.raises(Exit) as ended:
        maintain.test.body(Context(), **options)
    assert ended.value.code == UsageError.exit_code
    assert not hasattr(started, "arguments")


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


@pytest.mark.slow
def test_what_shares_a_server_or_the_compilers_stays_with_one_worker_and_comes_first(tmp_path):
    for name in FILES:
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(NOTES + "pytestmark = pytest.mark.integration\n" * name.startswith("integration/"))
    copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    copy(ROOT / "pyproject.toml", tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NOTES": str(tmp_path / "notes")}
    command = [sys.executable, "-m", "pytest", "--numprocesses=2", "tests"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f" {3 * len(FILES)} passed" in result.stdout.splitlines()[-1]
    notes = [line.split() for line in Path(env["NOTES"]).read_text().splitlines()]
    of = {name: {worker for worker, file in notes if file == f"tests/{name}"} for name in FILES}
    assert all(len(workers) == 1 for workers in of.values()), "a file stays with one worker"
    assert of["engine/test_x.py"] == of["integration/test_bench.py"] == of["integration/test_road.py"]
    assert of["integration/test_audit.py"] == of["integration/test_kernels.py"] != of["integration/test_road.py"]
    ranks = [[FILES.index(file.partition("/")[2]) for by, file in notes if by == worker] for worker in ("gw0", "gw1")]
    assert ranks == [sorted(files) for files in ranks]
    assert {files[0] for files in ranks} == {0, 3}, "each worker begins with one of the two long kinds"


def test_every_check_runs_and_those_that_failed_are_named(monkeypatch, capsys):
    programs = suite.LINT.path / "bin"
    programs.mkdir(parents=True)
    for name, code in (("good", 0), ("bad", 1)):
        (programs / name).write_text(f"#!/bin/sh\necho {name} says $1\nexit {code}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(suite, "CHECKS", {"one": ("bad", "x"), "two": ("good",), "three": ("missing",)})
    monkeypatch.setattr(suite.environments, "ensure", lambda *_: None)
    with pytest.raises(ProcessError, match="one, three", check=lambda error: error.code == "process.checks"):
        suite.check()
    assert capsys.readouterr().out.startswith("bad says x\n")


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
@pytest.mark.parametrize("installed", [True, False])
def test_a_linter_without_a_wheel_is_the_machines_own_or_named(monkeypatch, tmp_path, capsys, machine, installed):
    if installed:
        (tmp_path / "shellcheck").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "shellcheck").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(suite.platform, "machine", lambda: machine)
    monkeypatch.setattr(suite, "CHECKS", {"shell": ("shellcheck",)})
    monkeypatch.setattr(suite.environments, "ensure", lambda *_: None)
    if machine == "aarch64" and not installed:
        suite.check()
        assert "NOT CHECKED: shellcheck" in " ".join(capsys.readouterr().err.split())
    else:
        with pytest.raises(ProcessError, match="shell"):
            suite.check()


def test_shell_scripts_are_known_by_their_first_line():
    names = {file.name for file in suite.shell_scripts()}
    assert {"inv", "run", "packages", "start", "with-ca", "engine.sh"} <= names
    assert not {name for name in names if name.endswith((".py", ".toml", ".yml"))}
