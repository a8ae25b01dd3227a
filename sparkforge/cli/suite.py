"""A contributor's two loops: the checks that need no test, and the tests; each in an environment of its own."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from sparkforge import environments, pins
from sparkforge.core import memory, paths
from sparkforge.core.console import Steps, echo, say
from sparkforge.core.errors import ProcessError
from sparkforge.core.files import require_space
from sparkforge.core.paths import ROOT
from sparkforge.core.process import call, run_unchecked
from sparkforge.environments import Environment
from sparkforge.pins import locks
from sparkforge.serve.devices.in_environment import prepare_environment

LINT, UNIT = Environment("lint"), Environment("unit")
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
SHELL_SCRIPTS = ("inv", ".ci", "spark_mxfp4/test", "tests/packages", "deploy", "tests/engine")
LIBRARY_PATH = str(ROOT / "spark_mxfp4" / "src")
# Name → a program of the environment and its arguments; `check` adds the files of shellcheck.
CHECKS = {
    "format": ("ruff", "format", "--check"),
    "lint": ("ruff", "check"),
    "types": ("mypy",),
    "imports": ("lint-imports", "--no-cache"),
    "spelling": ("codespell",),
    "shell": ("shellcheck", "--severity=warning"),
    "Dockerfiles": ("hadolint", "Dockerfile", "Dockerfile.dev"),
    "workflows": ("jactionlint", "--profile=correctness"),  # actionlint's rules
    "workflows' security": ("zizmor", "--offline", "--quiet", "--min-severity=medium", ".github/workflows"),
}

# Architecture → programs of CHECKS for which locks/lint.in has no wheel: the machine's own are run, if it has them.
WITHOUT_WHEEL = {"aarch64": ("shellcheck",)}


def check() -> None:
    """Run every check, print what they found, and raise ProcessError if one of them failed."""
    commands: dict[str, tuple[str, ...]] = {**CHECKS}
    if (ROOT / "lab").is_dir():  # a checkout
        commands["reference pages"] = (sys.executable, "-m", "lab.reference_pages", "--check")
    steps = Steps(len(commands) + 2)
    with steps.step("pins", "pins.toml and the locks") as tell:
        locks.require_current()
        if unread := pins.load().unread():
            tell(f"nobody has read the names of {len(unread)} git sources: {'; '.join(unread)}")
    with steps.step("environment", "linters, from locks/lint.txt"):
        environments.ensure(LINT, pins.load())
    programs = LINT.path / "bin"
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # jactionlint looks for shellcheck
    failed: dict[str, str] = {}
    for name, (program, *arguments) in commands.items():
        executable: str | Path | None = programs / program  # an absolute program stays as it is
        if not (programs / program).exists() and program in WITHOUT_WHEEL.get(platform.machine(), ()):
            executable = shutil.which(program)
        try:
            with steps.step(name) as tell:
                if executable:
                    _run_check(executable, [*arguments, *(shell_scripts() if program == "shellcheck" else ())], path)
                else:
                    tell(f"NOT CHECKED: {program} has no wheel for this machine; sudo apt install {program}")
        except ProcessError as error:
            failed[name] = error.why
    for name, output in failed.items():
        say(f"\n── {name} ──")
        echo(output)
    if failed:
        fix = "correct what is printed above; `ruff format` and `ruff check --fix` do some of it"
        raise ProcessError("the checks failed", ", ".join(failed), fix, code="process.checks")


def _run_check(program: str | Path, arguments: list[str | Path], path: str) -> None:
    """Run one check. Raises ProcessError with all that it printed."""
    result = run_unchecked([program, *arguments], cwd=ROOT, env={"PYTHONPATH": LIBRARY_PATH, "PATH": path})
    if result.returncode:
        raise ProcessError(f"{program} failed", (result.stdout + result.stderr).strip(), "")


def shell_scripts() -> list[Path]:
    """Return the shell scripts of SHELL_SCRIPTS, by their ending or first line."""
    roots = [ROOT / name for name in SHELL_SCRIPTS]
    files = [file for root in roots for file in (sorted(root.rglob("*")) if root.is_dir() else [root])]
    shells = (b"sh", b"sh -eu")
    return [
        file
        for file in files
        if file.is_file()
        and (file.suffix == ".sh" or file.read_bytes()[:80].partition(b"\n")[0].rstrip().endswith(shells))
    ]


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
