"""`./inv pins.lock`: uv resolves every `locks/NAME.in` into a hash-locked set, as `locks/sets.toml` defines.

Each set has one index, and hashes for every file.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from sparkforge.core import tables
from sparkforge.core.console import say
from sparkforge.core.errors import InputError
from sparkforge.core.files import write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, run_unchecked
from sparkforge.core.program import ArgumentParser, exit_code
from sparkforge.core.tables import Record
from sparkforge.pins.locks import INSTALL, LOCKS, uv_environment, wheels_for
from sparkforge.pins.wheels import MACHINES, PYTHONS

TABLE = LOCKS / "sets.toml"
NETWORK = "check the network, or set PIP_INDEX_URL to your mirror, then run the same command again"
FORM = ("--generate-hashes", "--quiet", "--no-header", "--no-emit-index-url", "--no-emit-find-links",
        "--annotation-style=line")  # fmt: skip


class LockSet(Record):
    """One requirement set: its targets, overrides and constraints; `locks/sets.toml` explains the fields."""

    name: str
    target: str = "everywhere"
    override: str = ""
    constraint: str = ""
    omit: tuple[str, ...] = ()
    source: str = ""
    folder: str = ""

    @property
    def directory(self) -> Path:
        """The folder of its files."""
        return ROOT / self.folder if self.folder else LOCKS

    @property
    def path(self) -> Path:
        """The locked file."""
        return self.directory / f"{self.name}.txt"

    @property
    def requirements(self) -> str:
        """The file with its requirements."""
        return f"{self.source or self.name}.in"

    @property
    def options(self) -> list[str]:
        """The options of uv, in addition to the target's."""
        options = ["--override", self.override] if self.override else []
        options += ["--constraint", f"{self.constraint}.txt"] if self.constraint else []
        return options + [word for package in self.omit for word in ("--no-emit-package", package)]

    @property
    def inputs(self) -> list[Path]:
        """The input files of its resolution."""
        constraint = f"{self.constraint}.txt" if self.constraint else ""
        names = [self.requirements, *filter(None, (self.override, constraint))]
        lines = (self.directory / self.requirements).read_text(encoding="utf-8").splitlines()
        included = [name for line in lines if line.startswith("-r ") for name in line.split()[1:2]]
        return [self.directory / name for name in [*names, *included]]

    def header(self) -> str:
        """The locked file's first line: the command that made it, and its inputs."""
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in self.inputs)).hexdigest()
        source = f"{self.folder or 'locks'}/{self.requirements}"
        return f"# Made from {source} by `./inv pins.lock`; do not edit. Inputs: sha256 {digest}\n"


class LockTable(Record):
    """The whole of `locks/sets.toml`: uv's options by target, and the sets in the order in which they are resolved."""

    schema_: Literal[1] = Field(alias="schema")
    targets: dict[str, tuple[str, ...]]
    sets: dict[str, LockSet]

    @field_validator("sets", mode="before")
    @classmethod
    def _name_sets(cls, sets: object) -> object:
        if not isinstance(sets, dict):
            return sets
        return {name: {**lock, "name": name} if isinstance(lock, dict) else lock for name, lock in sets.items()}

    @model_validator(mode="after")
    def _names_are_known(self) -> LockTable:
        earlier: set[str] = set()
        for name, lock in self.sets.items():
            if lock.target not in self.targets or lock.constraint not in {"", *earlier}:
                raise ValueError(f"{name} names an unknown target, or a constraint that is not resolved before it")
            earlier.add(name)
        return self


@cache
def load(table: Path = TABLE) -> LockTable:
    """Read the table of sets. Raises InputError."""
    return tables.load(table, LockTable)


def drifted() -> list[str]:
    """Return the names of the sets whose inputs have changed since they were locked."""
    return [lock.name for lock in load().sets.values() if not _text(lock.path).startswith(lock.header())]


def require_current() -> None:
    """Raise InputError if a set is older than its inputs."""
    if old := drifted():
        raise InputError(
            f"locks are out of date: {', '.join(old)}",
            "their inputs changed since",
            "./inv pins.lock",
            code="input.pins",
        )


def compile_set(lock: LockSet) -> Path:
    """Resolve one set; a locked version is kept unless it must change. Raises ProcessError."""
    output = lock.path
    with tempfile.TemporaryDirectory(dir=lock.directory) as folder:
        work = Path(folder) / output.name  # uv writes in place; a killed run must not leave half a lock
        if output.exists():
            shutil.copyfile(output, work)
        command = [sys.executable, "-m", "uv", "pip", "compile", lock.requirements, *load().targets[lock.target], *FORM]
        run([*command, *lock.options, "--output-file", work], cwd=lock.directory, env=uv_environment(), fix=NETWORK)
        locked = [line for line in _text(work).splitlines(keepends=True) if not line.startswith("#")]
        write_atomic(output, lock.header() + "".join(locked))
    return output


def compile_all() -> list[Path]:
    """Resolve every set, in the order in which they constrain each other. Raises as `compile_set`, `require_wheels`."""
    made = []
    for lock in load().sets.values():
        made.append(compile_set(lock))
        if lock.target == "everywhere":
            require_wheels(lock)
    return made


def require_wheels(lock: LockSet) -> None:
    """Raise InputError unless the package index has wheels of a set's packages for every machine and Python."""
    for machine, python in itertools.product(MACHINES, PYTHONS):
        command: list[str | Path] = [*INSTALL, "--dry-run", "--target", tempfile.gettempdir(), "-r", lock.path]
        process = run_unchecked([*command, "--python-version", python, *wheels_for(machine)], env=uv_environment())
        if process.returncode:
            failure = f"the locked set {lock.name} cannot be installed on {machine} with Python {python}"
            fix = f"another package or a marker in {lock.requirements}, then ./inv pins.lock"
            raise InputError(failure, process.stderr.strip(), fix, code="input.pins")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> None:
    """Resolve every set and name them. Raises as `compile_all`."""
    ArgumentParser(prog="./inv pins.lock").parse_args()
    say(f"locked {', '.join(path.name for path in compile_all())}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
