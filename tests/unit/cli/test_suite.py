"""`./inv test` and `./inv check`: the programs that they start, and the errors if one fails."""

import sys

import pytest
from expected import refused
from invoke.context import Context
from invoke.exceptions import Exit
from programs import write_program

from lab import check, suite
from sparkforge.cli import maintain
from sparkforge.core.console import Steps
from sparkforge.core.errors import UsageError
from sparkforge.core.memory import Machine


@pytest.mark.parametrize(
    "words",
    ["--minutes=5", "--all --fast", "--robustness --fast", "--robustness --minutes=0", "--robustness --minutes=x"],
)
def test_incompatible_options_are_refused(words):
    with pytest.raises(UsageError):
        suite.plan(words.split(), Machine(1, 1))


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
    write_program(tmp_path / "bin" / "good", "echo good says $1")
    write_program(tmp_path / "bin" / "bad", "echo bad says $1; exit 1")
    if installed:
        write_program(tmp_path / "shellcheck", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    pages = (sys.executable, "-m", "lab.reference_pages", "--check")
    checks = {"one": ("bad", "x"), "two": ("good",), "three": ("missing",), "shell": ("shellcheck",)}
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "reference_pages.py").write_text("import sys; sys.exit(f'{sys.argv[1:]} a page is old')")
    with refused("process.checks") as error:
        check.run_all({**checks, "reference pages": pages}, tmp_path / "bin", machine, Steps(5), tmp_path)
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
def test_the_program_of_a_run_follows_the_options_and_the_machine(words, cores, arguments):
    machine = Machine(64 * 10**9, cores)
    assert list(suite.plan(words.split(), machine).arguments[: len(arguments)]) == arguments
    assert ("--reruns=1" in suite.plan(words.split(), machine, on_ci=True).arguments) == (arguments[1] == "tests")


def test_a_run_that_fails_is_an_error(tmp_path):
    program = write_program(tmp_path / "python", 'exit "$(($# - 3))"')
    suite.run(suite.TestRun(("pytest", "passes"), {}), program)
    for failing in (suite.TestRun(("pytest", "x", "y"), {}), suite.TestRun(("a", "b", "c"), {}, output=tmp_path)):
        with refused("process.tests"):
            suite.run(failing, program)
