"""Hash-locked requirement sets: `locks/NAME.in` → `locks/NAME.txt`, resolved by uv; `locks/sets.toml` names the sets.

One index a set, hashes for every file.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from sparkforge.core import installers, tables
from sparkforge.core.console import say
from sparkforge.core.errors import InputError, NetworkError
from sparkforge.core.files import write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, run_unchecked
from sparkforge.core.tables import Record
from sparkforge.pins.index import pip_config
from sparkforge.pins.wheels import GLIBC, MACHINES, PYTHONS

LOCKS = ROOT / "locks"
NETWORK = "check the network, or set PIP_INDEX_URL to your mirror, then run the same command again"
FORM = ("--generate-hashes", "--quiet", "--no-header", "--no-emit-index-url", "--no-emit-find-links",
        "--annotation-style=line")  # fmt: skip
TABLE = LOCKS / "sets.toml"
INSTALL = (sys.executable, "-m", "uv", "pip", "install", "--require-hashes", "--no-deps", "--quiet")


class LockSet(Record):
    """One requirement set: what it is resolved for, and with which overrides and constraints; the table says more."""

    name: str
    target: str = "everywhere"
    override: str = ""
    constraint: str = ""
    omit: tuple[str, ...] = ()
    source: str = ""
    folder: str = ""

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return ROOT / self.folder if self.folder else LOCKS

    @property
    def path(self) -> Path:
        """The locked file."""
        return self.directory / f"{self.name}.txt"

    @property
    def requirements(self) -> str:
        """The file that it is resolved from."""
        return f"{self.source or self.name}.in"

    @property
    def options(self) -> list[str]:
        """The options of uv beside the target's."""
        options = ["--override", self.override] if self.override else []
        options += ["--constraint", f"{self.constraint}.txt"] if self.constraint else []
        return options + [word for package in self.omit for word in ("--no-emit-package", package)]

    @property
    def inputs(self) -> list[Path]:
        """The files that its resolution reads."""
        constraint = f"{self.constraint}.txt" if self.constraint else ""
        names = [self.requirements, *filter(None, (self.override, constraint))]
        lines = (self.directory / self.requirements).read_text(encoding="utf-8").splitlines()
        included = [name for line in lines if line.startswith("-r ") for name in line.split()[1:2]]
        return [self.directory / name for name in [*names, *included]]

    def header(self) -> str:
        """The locked file's first line: what made it, and from which inputs."""
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


def lock_path(name: str) -> Path:
    """Return the path of a locked set."""
    lock = load().sets.get(name)
    return lock.path if lock else LOCKS / f"{name}.txt"


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
    """Raise InputError unless the package index has wheels of all of a set for every machine and Python."""
    for machine, python in itertools.product(MACHINES, PYTHONS):
        command: list[str | Path] = [*INSTALL, "--dry-run", "--target", tempfile.gettempdir(), "-r", lock.path]
        process = run_unchecked([*command, "--python-version", python, *wheels_for(machine)], env=uv_environment())
        if process.returncode:
            failure = f"the locked set {lock.name} cannot be installed on {machine} with Python {python}"
            fix = f"another package or a marker in {lock.requirements}, then ./inv pins.lock"
            raise InputError(failure, process.stderr.strip(), fix, code="input.pins")


def wheels_for(machine: str) -> list[str]:
    """Return uv's options to install only wheels, those for `machine`."""
    return ["--python-platform", f"{machine}-manylinux_2_{GLIBC}", "--only-binary", ":all:"]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def uv_environment() -> Mapping[str, str]:
    """Return uv's settings: pip's index (uv reads no pip configuration), no other, and pip's CA bundle."""
    config = pip_config()
    env = {
        "UV_DEFAULT_INDEX": os.environ.get("UV_DEFAULT_INDEX") or config.index_url,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "UV_NO_CONFIG": "1",
    }
    if config.cert:
        env["SSL_CERT_FILE"] = config.cert
    return env


def replace(text: str, replaced: Mapping[str, str]) -> str:
    """Return a locked set with other requirement lines for the packages in `replaced`; markers stay.

    Raises InputError for a package that the set lacks.
    """
    for package, line in replaced.items():
        requirement, _, hashes = line.partition(" ")
        text, count = re.subn(
            rf"^{re.escape(package)}==[^ ;]+( ;[^\\\n]*)? \\\n(?:    --hash=.*\n)+",
            lambda match: f"{requirement}{match[1] or ''} {hashes}\n",  # noqa: B023 - called at once
            text,
            flags=re.MULTILINE,
        )
        if count != 1:
            raise InputError(
                f"{package} cannot be replaced", f"the locked set names it {count} times", "./inv pins.lock",
                code="input.pins",
            )  # fmt: skip
    return text


def install(  # noqa: PLR0913 - as many as uv has
    python: Path,
    name: str,
    *,
    find_links: tuple[Path, ...] = (),
    replaced: Mapping[str, str] | None = None,
    extra: tuple[str, ...] = (),
    target: Path | None = None,
    machine: str = "",
    copy: bool = False,
    bytecode: bool = True,
) -> None:
    """Install a locked set and the requirement lines `extra` into the environment of `python`, or into folder `target`.

    `replaced` (package → requirement line) takes the place of what the set says of a package. Files of `find_links` are
    used where their hash is in the requirements. A `machine` (`uname -m`) that is not this one gets its own wheels.
    `copy`, and a target folder, make copies instead of hard links into uv's cache: a hard link's ctime changes with
    every other link, and ccache then sees its headers "modified". Raises NetworkError with the cause that uv printed.
    """
    command = [*INSTALL, "--python", str(python), "-r", "-"]
    command += ["--compile-bytecode"] if bytecode else []
    if machine not in ("", os.uname().machine):
        command += wheels_for(machine)
    for folder in find_links:
        command += ["--find-links", str(folder)]
    command += ["--target", str(target)] if target else []
    command += ["--link-mode", "copy"] if copy or target else []
    requirements = "\n".join([replace(_text(lock_path(name)), replaced or {}), *extra])

    def attempt() -> str:
        process = run_unchecked(command, env=uv_environment(), stdin=requirements)
        return (process.stdout + process.stderr or f"exit code {process.returncode}") if process.returncode else ""

    if refused := installers.insist(attempt, say, f"locked set {name}"):
        failure = f"cannot install the locked set {name}"
        raise NetworkError(failure, refused.cause, refused.fix, code="network.fetch")
