"""`./inv test` and `./inv check`: what they start, and what their failures say."""

from types import SimpleNamespace

import pytest
from expected import refused
from invoke.context import Context
from invoke.exceptions import Exit

from lab import check, suite
from sparkforge.cli import maintain
from sparkforge.core.errors import ProcessError, UsageError
from sparkforge.core.memory import Machine


@pytest.mark.parametrize(
    "words",
    ["--minutes=5", "--all --fast", "--robustness --fast", "--robustness --minutes=0", "--robustness --minutes=x"],
)
def test_options_that_do_not_go_together_are_refused(monkeypatch, words):
    monkeypatch.setattr(suite, "call", lambda *_args, **_more: pytest.fail("tests were started"))
    monkeypatch.setattr("sys.argv", ["lab.suite", *words.split()])
    with pytest.raises(UsageError):
        suite.main()


def test_the_command_ends_with_the_code_of_the_program_in_the_laboratory():
    with pytest.raises(Exit) as ended:
        maintain.test.body(Context(), select="-x", minutes="5")
    assert ended.value.code == UsageError.exit_code


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

    program(check.LINT.path / "bin" / "good", "echo good says $1")
    program(check.LINT.path / "bin" / "bad", "echo bad says $1; exit 1")
    if installed:
        program(tmp_path / "shellcheck", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(check.platform, "machine", lambda: machine)
    checks = {"one": ("bad", "x"), "two": ("good",), "three": ("missing",), "shell": ("shellcheck",)}
    monkeypatch.setattr(check, "CHECKS", checks)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "reference_pages.py").write_text("import sys; sys.exit(f'{sys.argv[1:]} a page is old')")
    monkeypatch.setattr(check.environments, "ensure", lambda *_: None)
    with refused("process.checks") as error:
        check.check()
    assert error.value.why == f"{failed}, reference pages"
    output = capsys.readouterr()
    assert output.out.startswith("bad says x\n")
    assert output.out.endswith("['--check'] a page is old\n")
    assert ("NOT CHECKED: shellcheck" in " ".join(output.err.split())) == (failed == "one, three")


@pytest.mark.parametrize(
    ("words", "cores", "arguments"),
    [
        ("--fast", 20, ["pytest", "tests/unit", "-m", "not slow", "--dist=worksteal", "--numprocesses=8"]),
        ("", 2, ["pytest", "tests", "--durations=15", "-m", "not nightly", "--numprocesses=2"]),
        ("--select=ctrl", 2, ["pytest", "tests", "--durations=15", "-k", "ctrl"]),
        ("--robustness --minutes=7", 2, ["robustness.campaign", "--minutes", "7", "--output"]),
    ],
)
def test_the_programs_of_a_run_and_its_failure(monkeypatch, words, cores, arguments):
    calls = []
    monkeypatch.setattr(suite, "prepare_environment", lambda *_: SimpleNamespace(python="all"))
    monkeypatch.setattr(suite.environments, "ensure", lambda *_: True)
    monkeypatch.setattr(suite.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(suite.memory, "measure", lambda: Machine(64 * 10**9, cores))
    monkeypatch.setattr(suite, "call", lambda command, **_: calls.append(command) or len(calls) - 1)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.argv", ["lab.suite", *words.split()])
    suite.main()
    assert calls[0][2 : 2 + len(arguments)] == arguments
    with pytest.raises(ProcessError):  # the second run ends with code 1
        suite.main()
