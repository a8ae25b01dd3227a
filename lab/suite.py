"""`./inv test`: the tests in an environment of their own, and the attacks of --robustness."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from sparkforge import environments, pins
from sparkforge.cli.command import whole_number
from sparkforge.core import memory, paths
from sparkforge.core.console import Steps
from sparkforge.core.errors import ProcessError, UsageError
from sparkforge.core.files import require_space
from sparkforge.core.paths import ROOT
from sparkforge.core.process import call
from sparkforge.core.program import ArgumentParser, exit_code
from sparkforge.environments import Environment
from sparkforge.serve.devices.in_environment import prepare_environment

UNIT = Environment("unit")
WORKERS = 2  # one serves while the other compiles (tests/conftest.py); on 2 cores a third one saves a tenth of the time
FAST_WORKERS = 8  # without vLLM and torch; a test that waits for a process leaves its core to another
TEMPORARY_BYTES = 200_000_000  # chosen, not measured: on a full disk pytest itself ends in a traceback
WORKER_BYTES = 8_000_000_000  # pytest with torch 1.5 GB, and a vLLM of two ranks or two servers 6 GB
# Set where vLLM and torch are left out on purpose: tests that import them are skipped (tests/conftest.py).
FAST = "SPARKFORGE_TEST_FAST"
# On CI a failed test runs once more, and the report names it (`RERUN`): two busy cores give or take seconds that a test
# with real processes did not expect. A fault of ours fails twice. The fast tests have hardly any such, and asking the
# plugin for each of them would take a quarter of their time.
RERUNS = ("--reruns=1", "--reruns-delay=5")
COVERAGE = ("--cov=sparkforge", "--cov=validate", "--cov-report=term:skip-covered")


def run_tests(*, fast: bool, select: str, coverage: bool = False, nightly: bool = False) -> None:
    """Run the tests; pytest's output goes straight through. Raises ProcessError.

    `fast` runs the unit tests without those marked slow, `nightly` also those marked nightly; `select` ignores marks.
    """
    temporary = Path(tempfile.gettempdir())
    require_space(temporary, TEMPORARY_BYTES, "the tests")
    # The tests start some hundred interpreters: each would compile our modules again where its caller forbids bytecode.
    variables = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}
    if fast:
        environments.ensure(UNIT, pins.load())
        python, arguments = UNIT.python, ["tests/unit"]
        variables[FAST] = "1"
        workers = min(FAST_WORKERS, 2 * (os.cpu_count() or 1))
    else:
        python = prepare_environment(Steps(1), environments.TEST).python
        arguments = ["tests", "--durations=15"]
        machine = memory.measure()
        workers = max(1, min(WORKERS, machine.cores, machine.available // WORKER_BYTES))
    if select:
        arguments += ["-k", select]
    elif fast:
        arguments += ["-m", "not slow", "--dist=worksteal"]
    elif not nightly:
        arguments += ["-m", "not nightly"]
    if workers > 1 and not select:
        arguments += [f"--numprocesses={workers}"]
        variables["OMP_NUM_THREADS"] = "1"  # two pools of as many threads as there are cores would wait for each other
    if os.environ.get("CI") and not fast:
        arguments += RERUNS
    if coverage:
        arguments += COVERAGE
    code = call([python, "-m", "pytest", *arguments], cwd=ROOT, env=variables)
    if code:
        require_space(temporary, TEMPORARY_BYTES, "the tests")  # on a full disk tests fail for no reason of their own
        why = f"pytest ended with code {code}"
        raise ProcessError("the tests failed", why, "read pytest's report above", code="process.tests")


def run_robustness(*, minutes: float) -> None:
    """Attack for `minutes`: failing disks, kills, races, malformed input. Prints the counts and writes them as JSON.

    Raises ProcessError if anything was lost, hung, or ended in a traceback.
    """
    env = prepare_environment(Steps(1), environments.TEST)
    output = paths.state() / "robustness" / f"{datetime.now(UTC):%Y%m%d_%H%M%S}.json"
    command: list[str | Path] = [env.python, "-m", "robustness.campaign", "--minutes", f"{minutes:g}"]
    # No package index may be reached: every scenario has its own.
    variables = {"PYTHONPATH": str(ROOT / "tests"), "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    code = call([*command, "--output", output], cwd=ROOT, env=variables)
    if code:
        fix = "run one of the commands above: each repeats a case"
        raise ProcessError("the robustness tests failed", f"the counts are in {output}", fix, code="process.tests")


def main() -> None:
    """Run what the arguments of `./inv test` name. Raises UsageError, ProcessError."""
    parser = ArgumentParser(prog="./inv test")
    for name in ("all", "fast", "coverage", "robustness"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--select", default="")
    parser.add_argument("--minutes", default="")
    given = parser.parse_args()
    if not given.robustness:
        if given.minutes:
            raise UsageError("--minutes has no meaning here", "only --robustness takes it", "./inv test --robustness")
        if given.all and (given.fast or given.select):
            why = "--fast leaves tests out, and --select runs what it names, marked nightly or not"
            raise UsageError("--all goes with neither --fast nor --select", why, "./inv test --all")
        run_tests(fast=given.fast, select=given.select, coverage=given.coverage, nightly=given.all)
        return
    if given.all or given.fast or given.select or given.coverage:
        why = "--all, --fast, --select and --coverage are for pytest"
        raise UsageError("--robustness runs no other tests", why, "./inv test --robustness")
    length = whole_number("--minutes", given.minutes or "60")
    if length < 1:
        raise UsageError(f"--minutes {length} is too short", "it takes a whole number from 1", "--minutes 10")
    run_robustness(minutes=length)


if __name__ == "__main__":
    sys.exit(exit_code(main))
