"""`./inv test` and `./inv check`: what they start, and what their failures say."""

from types import SimpleNamespace

import pytest
from invoke.context import Context
from invoke.exceptions import Exit

from sparkforge.cli import maintain, suite
from sparkforge.core import files
from sparkforge.core.errors import ProcessError, StorageError, UsageError
from sparkforge.core.memory import Machine

GB = 10**9
FAST = ["tests/unit", "-m", "not slow", "--dist=worksteal"]
ALL = ["tests", "--durations=15"]


@pytest.fixture
def started(monkeypatch):
    """Note what would be started in place of an environment's interpreter; `code` is what it would end with."""
    seen = SimpleNamespace(code=0, cores=2, available=64 * GB)

    def call(command, *, cwd, env):
        seen.python, seen.arguments, seen.env = command[0], command[1:], env
        return seen.code

    monkeypatch.setattr(suite, "prepare_environment", lambda *_: SimpleNamespace(python="all"))
    monkeypatch.setattr(suite.environments, "ensure", lambda *_: True)
    monkeypatch.setattr(suite.os, "cpu_count", lambda: seen.cores)
    monkeypatch.setattr(suite, "call", call)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(suite.memory, "measure", lambda: Machine(seen.available, seen.cores))
    return seen


@pytest.mark.parametrize(
    ("options", "machine", "arguments"),
    [
        ({}, {}, [*ALL, "-m", "not nightly", "--numprocesses=2"]),
        ({}, {"cores": 4, "available": 15 * GB}, [*ALL, "-m", "not nightly"]),
        ({}, {"CI": True}, [*ALL, "-m", "not nightly", "--numprocesses=2", *suite.RERUNS]),
        ({"all_": True}, {}, [*ALL, "--numprocesses=2"]),
        ({"fast": True}, {}, [*FAST, "--numprocesses=4"]),
        ({"fast": True}, {"cores": 20}, [*FAST, "--numprocesses=8"]),
        ({"fast": True, "coverage": True}, {}, [*FAST, "--numprocesses=4", *suite.COVERAGE]),
    ],
    ids=str,
)
def test_pytest_gets_the_tests_and_workers_of_options_and_machine(started, monkeypatch, options, machine, arguments):
    if machine.pop("CI", False):
        monkeypatch.setenv("CI", "true")
    vars(started).update(machine)
    maintain.test.body(Context(), **options)
    assert started.arguments == ["-m", "pytest", *arguments]
    parallel = any(argument.startswith("--numprocesses") for argument in arguments)
    assert started.env.get("OMP_NUM_THREADS") == ("1" if parallel else None)
    assert (started.python, suite.FAST in started.env) == (
        (suite.UNIT.python, True) if "fast" in options else ("all", False)
    )


def test_a_failure_is_an_error_and_on_a_full_disk_names_the_disk(started, monkeypatch):
    started.code = 1
    with pytest.raises(ProcessError, match="ended with code 1", check=lambda error: error.code == "process.tests"):
        suite.run_tests(fast=False, select="")
    free = iter([GB, 10**6])  # before and after the tests
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    with pytest.raises(StorageError, check=lambda error: error.code == "storage.full"):
        suite.run_tests(fast=False, select="")


@pytest.mark.parametrize(
    "options",
    [{"minutes": "5"}, {"all_": True, "fast": True}, {"robustness": True, "fast": True}, {"minutes": "0"}],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(started, options):
    with pytest.raises(Exit) as ended:
        maintain.test.body(Context(), **options)
    assert ended.value.code == UsageError.exit_code
    assert not hasattr(started, "arguments")


@pytest.mark.parametrize(
    ("machine", "installed", "failed"),
    [("aarch64", False, "one, three"), ("aarch64", True, "one, three, shell"),
     ("x86_64", False, "one, three, shell")],
)  # fmt: skip
def test_every_check_runs_and_those_that_failed_are_named(monkeypatch, tmp_path, capsys, machine, installed, failed):
    def program(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    program(suite.LINT.path / "bin" / "good", "echo good says $1")
    program(suite.LINT.path / "bin" / "bad", "echo bad says $1; exit 1")
    if installed:
        program(tmp_path / "shellcheck", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(suite.platform, "machine", lambda: machine)
    checks = {"one": ("bad", "x"), "two": ("good",), "three": ("missing",), "shell": ("shellcheck",)}
    monkeypatch.setattr(suite, "CHECKS", checks)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "reference_pages.py").write_text("import sys; sys.exit(f'{sys.argv[1:]} a page is old')")
    monkeypatch.setattr(suite.environments, "ensure", lambda *_: None)
    with pytest.raises(ProcessError, check=lambda error: error.code == "process.checks") as error:
        suite.check()
    assert error.value.why == f"{failed}, reference pages"
    output = capsys.readouterr()
    assert output.out.startswith("bad says x\n")
    assert output.out.endswith("['--check'] a page is old\n")
    assert ("NOT CHECKED: shellcheck" in " ".join(output.err.split())) == (failed == "one, three")
