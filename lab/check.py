"""`./inv check`: every linter, mypy and the import contracts; with --docs the documentation site instead.

MkDocs reads mkdocs.yml and docs/, and writes .sparkforge/site.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab import locks
from sparkforge import environments, pins
from sparkforge.core import paths
from sparkforge.core.console import Steps, echo, say
from sparkforge.core.errors import ProcessError
from sparkforge.core.files import locked
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, run_unchecked
from sparkforge.core.program import ArgumentParser, exit_code
from sparkforge.environments import Environment
from sparkforge.pins.table import Pins

LINT, DOCS = Environment("lint"), Environment("docs")
SHELL_SCRIPTS = ("inv", ".ci", "spark_mxfp4/test", "tests/packages", "deploy", "tests/engine")
LIBRARY_PATH = str(ROOT / "spark_mxfp4" / "src")
SITE_VARIABLES = {"PYTHONPATH": "", "NO_MKDOCS_2_WARNING": "1"}
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

# Architecture → programs of CHECKS without a wheel in locks/lint.in: the machine's own programs run, if installed.
WITHOUT_WHEEL = {"aarch64": ("shellcheck",)}


def check() -> None:
    """Run all checks, print their findings, and raise ProcessError if one of them failed."""
    reference = (sys.executable, "-m", "lab.reference_pages", "--check")
    ours = {name: (sys.executable, "-m", f"lab.{name}") for name in ("pages", "names")}
    commands: dict[str, tuple[str, ...]] = {**CHECKS, "reference pages": reference, **ours}
    steps = Steps(len(commands) + 2)
    with steps.step("pins", "pins.toml and the locks") as tell:
        locks.require_current()
        if sources := unread(pins.load()):
            tell(f"unknown values of {len(sources)} sources: {'; '.join(sources)}")
    with steps.step("environment", "linters, from locks/lint.txt"):
        environments.ensure(LINT, pins.load())
    run_all(commands, LINT.path / "bin", platform.machine(), steps)


def unread(table: Pins) -> list[str]:
    """Return unknown commits and trees of git sources and sizes of images, as `name tag (commit or tree)`."""
    images = [pin for pin in table.components() if pin.kind == "image" and pin.size == "unknown"]
    found = {f"{pin.image} {pin.version} (size: never pulled)" for pin in images}
    for name, pin in ((name, pin) for stack in table.stacks.values() for name, pin in stack.git.items()):
        if keys := [key for key in ("commit", "tree") if getattr(pin, key) == "unknown"]:
            found.add(f"{name} {pin.tag[:12]} ({', '.join(keys)})")
    return sorted(found)


def run_all(
    commands: Mapping[str, tuple[str, ...]], programs: Path, machine: str, steps: Steps, root: Path = ROOT
) -> None:
    """Run the named `commands` in `root`; bare names are programs of the folder `programs`. Raises ProcessError.

    If a program has no wheel for `machine`, the machine's own program runs; without that program the check is skipped.
    """
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # jactionlint looks for shellcheck
    failed: dict[str, str] = {}
    for name, (program, *arguments) in commands.items():
        executable: str | Path | None = programs / program  # an absolute path stays unchanged
        if not (programs / program).exists() and program in WITHOUT_WHEEL.get(machine, ()):
            executable = shutil.which(program)
        words = [*arguments, *(shell_scripts() if program == "shellcheck" else ())]
        try:
            with steps.step(name) as tell:
                if executable:
                    _run_check([executable, *words], path, root)
                else:
                    tell(f"NOT CHECKED: {program} has no wheel for this machine; sudo apt install {program}")
        except ProcessError as error:
            failed[name] = error.why
    for name, output in failed.items():
        say(f"\n── {name} ──")
        echo(output)
    if failed:
        fix = "again   # first correct the faults above; `ruff format` and `ruff check --fix` correct some of them"
        raise ProcessError("the checks failed", ", ".join(failed), fix, code="process.checks")


def _run_check(command: Sequence[str | Path], path: str, root: Path) -> None:
    """Run one check. Raises ProcessError with all that it printed."""
    result = run_unchecked(command, cwd=root, env={"PYTHONPATH": LIBRARY_PATH, "PATH": path})
    if result.returncode:
        raise ProcessError(f"{command[0]} failed", (result.stdout + result.stderr).strip(), "again")


def shell_scripts() -> list[Path]:
    """Return the shell scripts among SHELL_SCRIPTS, recognised by suffix or first line."""
    roots = [ROOT / name for name in SHELL_SCRIPTS]
    files = [file for root in roots for file in (sorted(root.rglob("*")) if root.is_dir() else [root])]
    shells = (b"sh", b"sh -eu")
    return [
        file
        for file in files
        if file.is_file()
        and (file.suffix == ".sh" or file.read_bytes()[:80].partition(b"\n")[0].rstrip().endswith(shells))
    ]


def build_site() -> Path:
    """Build the site and return its folder; every warning, such as a broken link, is an error.

    The previous site stays if the build fails. Raises ProcessError with MkDocs' last lines, or NetworkError.
    """
    environments.ensure(DOCS, pins.load())
    site = paths.state() / "site"
    new = site.with_suffix(".new")
    command: list[str | Path] = [DOCS.python, "-m", "mkdocs", "build", "--strict", "--site-dir", new]
    with locked(site.with_suffix(".lock"), "build the documentation"):
        run(command, cwd=paths.ROOT, env=SITE_VARIABLES, fix="correct the page that it names")
        shutil.rmtree(site, ignore_errors=True)
        new.rename(site)
    return site


def main() -> None:
    """Run the checks, or build the site and print its folder. Raises ProcessError, NetworkError."""
    parser = ArgumentParser(prog="./inv check")
    parser.add_argument("--docs", action="store_true")
    if parser.parse_args().docs:
        echo(str(build_site()))
    else:
        check()


if __name__ == "__main__":
    sys.exit(exit_code(main))
