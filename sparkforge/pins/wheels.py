"""Choose the file of each requirement in a hash-locked set, for this machine or another one.

`pip download --platform` cannot do this: it evaluates the markers of a lock (`; platform_machine == …`) for the machine
that runs it, and takes one platform tag at a time. Tags and markers are evaluated by PyPA's `packaging`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from sparkforge.core import paths
from sparkforge.core.errors import InputError, ProcessError
from sparkforge.core.files import read_json, sha256_file, write_json
from sparkforge.core.manifest import Made, once
from sparkforge.pins.index import client, project_page
from sparkforge.pins.table import Component

if TYPE_CHECKING:  # at run time the import would load an HTML parser
    from pypi_simple import DistributionPackage

GLIBC = 35  # the newest minor version of glibc 2 that a chosen wheel may require: Ubuntu 22.04's, below DGX OS's 2.39
MACHINES = ("aarch64", "x86_64")  # machines with pinned wheels, as `uname -m` prints them
PYTHONS = ("3.11", "3.12", "3.13")  # pyproject.toml requires-python
LEGACY = {"manylinux2014": 17, "manylinux2010": 12, "manylinux1": 5}  # PEP 600
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class TargetMachine:
    """The machine for which files are chosen, as `uname -m` prints it, and its Python's version."""

    machine: str
    python: tuple[int, int] = sys.version_info[:2]

    def __str__(self) -> str:
        return f"cp{self.python[0]}{self.python[1]}-{self.machine}"

    def tags(self) -> dict[Tag, int]:
        """Return every wheel tag that the machine accepts, with its rank; lower is better."""
        platforms = []
        for minor in range(GLIBC, 4, -1):
            platforms.append(f"manylinux_2_{minor}_{self.machine}")
            platforms += [f"{name}_{self.machine}" for name, glibc in LEGACY.items() if glibc == minor]
        platforms.append(f"linux_{self.machine}")
        tag = f"cp{self.python[0]}{self.python[1]}"
        ranked = [*cpython_tags(self.python, [tag], platforms), *compatible_tags(self.python, tag, platforms)]
        return {tag: rank for rank, tag in reversed(list(enumerate(ranked)))}

    def environments(self) -> list[dict[str, str | AbstractSet[str]]]:
        """Return the values for markers (PEP 508), for the first and the last patch release of its Python."""
        version = ".".join(map(str, self.python))
        linux: dict[str, str | AbstractSet[str]] = {
            **cast("dict[str, str]", default_environment()), "os_name": "posix", "sys_platform": "linux",
            "platform_system": "Linux", "platform_machine": self.machine, "implementation_name": "cpython",
            "platform_python_implementation": "CPython", "python_version": version,
        }  # fmt: skip
        return [{**linux, "python_full_version": f"{version}.{release}"} for release in (0, 99)]


@dataclass(frozen=True)
class Pick:
    """One file of a package index, by hash."""

    package: str
    filename: str
    sha256: str


def requirements(text: str, target: TargetMachine) -> Iterator[tuple[Requirement, frozenset[str]]]:
    """Return each requirement of a hash-locked set that holds on `target`, with its hashes. Raises InputError."""
    environments = target.environments()
    for line in text.replace("\\\n", " ").splitlines():
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            requirement = Requirement(entry.partition("--hash")[0].strip())
            marker = requirement.marker
            holds = marker is None or any(marker.evaluate(environment) for environment in environments)
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName, ValueError) as error:
            why = f"{entry[:80]!r}: {str(error)[:200]}"
            raise InputError("a lock is malformed", why, "./inv pins.lock", code="input.pins") from error
        hashes = frozenset(HASH.findall(entry))
        if not hashes or not re.fullmatch(r"==[^*,]+", str(requirement.specifier)):
            why = f"{entry[:80]} has no hash or no exact version"
            raise InputError(f"{requirement.name} is not locked", why, "./inv pins.lock", code="input.pins")
        if holds:
            yield requirement, hashes


def choose(
    requirement: Requirement, hashes: frozenset[str], files: Sequence[DistributionPackage], target: TargetMachine
) -> Pick:
    """Return the file of `requirement` that fits `target` best: a wheel, else a source archive. Raises InputError."""
    # Only locked files, because an index also lists file names that no tool can parse any more.
    digests = ((file.filename, (file.digests or {}).get("sha256", "")) for file in files)
    listed = {name: sha256 for name, sha256 in digests if sha256 in hashes}
    best = _best(listed, target)
    if not best:
        failure = f"{requirement.name}{requirement.specifier} has no file for {target}"
        why = f"none of the {len(hashes)} files in the lock fits it, or the index no longer has them"
        raise InputError(failure, why, "./inv pins.lock", code="input.pins")
    return Pick(requirement.name, best, listed[best])


def choose_pinned(component: Component, target: TargetMachine) -> Pick:
    """Return the wheel of a pinned component that fits `target` best. Raises ProcessError if none does."""
    best = _best((name for name in component.files if name.endswith(".whl")), target)
    if not best:
        failure = f"no {component.package} is pinned for this machine"
        fix = "rm -rf .venv && PYTHON=python3.12 ./inv up   # with Python 3.11 to 3.13 on x86_64 or aarch64"
        raise ProcessError(failure, f"pins.toml has no wheel for {target}", fix, code="process.setup")
    return Pick(component.package or "", best, component.files[best])


def _best(filenames: Iterable[str], target: TargetMachine) -> str:
    """Return the file that fits `target` best, the first of equal ones; empty if none does."""
    ranks = target.tags()
    ranked = [(rank, name) for name in filenames if (rank := _rank(name, ranks)) is not None]
    return min(ranked, key=lambda entry: entry[0])[1] if ranked else ""


def _rank(filename: str, ranks: Mapping[Tag, int]) -> int | None:
    if filename.endswith(".whl"):
        try:
            tags = parse_wheel_filename(filename)[3]
        except InvalidWheelFilename:
            return None
        return min((ranks[tag] for tag in tags if tag in ranks), default=None)
    return len(ranks) if filename.endswith((".tar.gz", ".zip")) else None


def picks(lock: Path, target: TargetMachine) -> list[Pick]:
    """Return the files of the set at `lock` for `target`, by name; one query each. Raises InputError, NetworkError."""
    sha256 = sha256_file(lock)
    cached = paths.cache() / "picks" / f"{lock.stem}-{target}-{sha256[:12]}.json"
    inputs = {"lock": sha256, "target": str(target), "glibc": f"2.{GLIBC}"}

    def make(temporary: Path) -> Made:
        with client() as http:
            chosen = [
                choose(requirement, hashes, project_page(requirement.name, http).packages, target)
                for requirement, hashes in requirements(lock.read_text(encoding="utf-8"), target)
            ]
        write_json(temporary, [asdict(pick) for pick in sorted(chosen, key=lambda pick: pick.filename)])
        return Made({cached.name: sha256_file(temporary)})

    once(cached, "picks", inputs, make)
    try:
        return [Pick(**pick) for pick in read_json(cached)]
    except (ValueError, TypeError):
        cached.unlink()
        once(cached, "picks", inputs, make)
        return [Pick(**pick) for pick in read_json(cached)]
