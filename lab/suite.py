"""`./inv test`: run the tests in their own environment, or with --robustness the robustness tests."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sparkforge import environments, pins
from sparkforge.cli.command import whole_number
from sparkforge.core import memory, paths
from sparkforge.core.console import Steps
from sparkforge.core.errors import ProcessError, UsageError
from sparkforge.core.files import require_space
from sparkforge.core.memory import Machine
from sparkforge.core.paths import ROOT
from sparkforge.core.process import call
from sparkforge.core.program import ArgumentParser, exit_code
from sparkforge.environments import Environment
from sparkforge.serve.devices.in_environment import prepare_environment

UNIT = Environment("unit")
WORKERS = 2  # one serves while the other compiles (tests/conftest.py); on 2 cores a third saves a tenth of the time
FAST_WORKERS = 8  # without vLLM and torch; a test that waits for a process leaves its core to another
TEMPORARY_BYTES = 200_000_000  # chosen, not measured: on a full disk pytest itself ends in a traceback
WORKER_BYTES = 8_000_000_000  # 1.5 GB for pytest with torch, and 6 GB for a vLLM of two ranks or two servers
# Set where vLLM and torch are left out on purpose: tests that import them are skipped (tests/conftest.py).
FAST = "SPARKFORGE_TEST_FAST"
# On CI a failed test runs once more, and the report names it (`RERUN`), because tests with real processes may time out
# on two busy cores. A fault of our code fails twice. Few of the fast tests start processes, and with the plugin they
# would take a quarter more time.
RERUNS = ("--reruns=1", "--reruns-delay=5")
COVERAGE = ("--cov=sparkforge", "--cov=validate", "--cov-report=term:skip-covered")


@dataclass(frozen=True)
class TestRun:
    """A run of the tests: `arguments` of `python -m`, and environment variables; a `fast` run needs no vLLM."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    fast: bool = False
    output: Path | None = None  # where the campaign writes its counts


def plan(words: Sequence[str], machine: Machine, *, on_ci: bool = False) -> TestRun:
    """Return the run for the arguments of `./inv test`. Raises UsageError.

    Without arguments the run has every test that is not marked nightly.
    """
    parser = ArgumentParser(prog="./inv test")
    for name in ("all", "fast", "coverage", "robustness"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--select", default="")
    parser.add_argument("--minutes", default="")
    given = parser.parse_args(words)
    if given.robustness:
        return _campaign(given)
    if given.minutes:
        raise UsageError("--minutes has no meaning here", "only --robustness takes it", "./inv test --robustness")
    if given.all and (given.fast or given.select):
        why = "--fast leaves tests out, and --select runs what it names, marked nightly or not"
        raise UsageError("--all goes with neither --fast nor --select", why, "./inv test --all")
    return _tests(given, machine, on_ci)


def _tests(given: argparse.Namespace, machine: Machine, on_ci: bool) -> TestRun:
    """Return the run of pytest."""
    # The tests start about a hundred interpreters, each of which would compile our modules again if bytecode is off.
    variables = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}
    if given.fast:
        arguments = ["tests/unit"]
        variables[FAST] = "1"
        workers = min(FAST_WORKERS, 2 * machine.cores)
    else:
        arguments = ["tests", "--durations=15"]
        workers = max(1, min(WORKERS, machine.cores, machine.available // WORKER_BYTES))
    if given.select:
        arguments += ["-k", given.select]
    elif given.fast:
        arguments += ["-m", "not slow", "--dist=worksteal"]
    elif not given.all:
        arguments += ["-m", "not nightly"]
    if workers > 1 and not given.select:
        arguments += [f"--numprocesses={workers}"]
        variables["OMP_NUM_THREADS"] = "1"  # two thread pools of the size of the machine would slow each other down
    if on_ci and not given.fast:
        arguments += RERUNS
    if given.coverage:
        arguments += COVERAGE
    return TestRun(("pytest", *arguments), variables, given.fast)


def _campaign(given: argparse.Namespace) -> TestRun:
    """Return the run of the robustness tests: failing disks, kills, races, malformed input. Raises UsageError."""
    if given.all or given.fast or given.select or given.coverage:
        why = "--all, --fast, --select and --coverage are for pytest"
        raise UsageError("--robustness runs no other tests", why, "./inv test --robustness")
    length = whole_number("--minutes", given.minutes or "60")
    if length < 1:
        raise UsageError(f"--minutes {length} is too short", "it takes a whole number from 1", "--minutes 10")
    output = paths.state() / "robustness" / f"{datetime.now(UTC):%Y%m%d_%H%M%S}.json"
    # Scenarios use their own package indexes; every other index must be unreachable.
    variables = {"PYTHONPATH": str(ROOT / "tests"), "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    arguments = ("robustness.campaign", "--minutes", str(length), "--output", str(output))
    return TestRun(arguments, variables, output=output)


def run(test_run: TestRun, python: str | Path) -> None:
    """Run the tests with `python`; their output is not captured. Raises ProcessError."""
    temporary = Path(tempfile.gettempdir())
    require_space(temporary, TEMPORARY_BYTES, "the tests")
    code = call([python, "-m", *test_run.arguments], cwd=ROOT, env=test_run.variables)
    if code and test_run.output:
        why, fix = f"the counts are in {test_run.output}", "again   # or one of the commands above: each repeats a case"
        raise ProcessError("the robustness tests failed", why, fix, code="process.tests")
    if code:
        require_space(temporary, TEMPORARY_BYTES, "the tests")  # on a full disk tests fail without a fault
        fix = "again   # first read pytest's report above"
        raise ProcessError("the tests failed", f"pytest ended with code {code}", fix, code="process.tests")


def main() -> None:
    """Run the tests that the arguments of `./inv test` select. Raises UsageError, ProcessError."""
    test_run = plan(sys.argv[1:], memory.measure(), on_ci=bool(os.environ.get("CI")))
    if test_run.fast:
        environments.ensure(UNIT, pins.load())
        python = UNIT.python
    else:
        python = prepare_environment(Steps(1), environments.TEST).python
    run(test_run, python)


if __name__ == "__main__":
    sys.exit(exit_code(main))
