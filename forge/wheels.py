"""Choose, for a machine that need not be this one, the file of each requirement in a hash-locked set.

`pip download --platform` cannot: it judges the markers of a lock (`; platform_machine == …`) by the machine it runs on,
and takes one platform tag at a time. Tags and markers are those of PyPA's `packaging`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import httpx
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from pypi_simple import DistributionPackage

from forge.index import client, project_page
from forge.manifest import Made, once
from sparkforge import paths
from sparkforge.errors import PinError
from sparkforge.files import sha256_file, write_json

GLIBC = 35  # the newest minor version of glibc 2 that a chosen wheel may want: Ubuntu 22.04's, below DGX OS's 2.39
LEGACY = {"manylinux2014": 17, "manylinux2010": 12, "manylinux1": 5}  # PEP 600
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Target:
    """The machine that files are for: as `uname -m` has it, and its Python's version."""

    machine: str
    python: tuple[int, int] = sys.version_info[:2]

    def __str__(self) -> str:
        return f"cp{self.python[0]}{self.python[1]}-{self.machine}"

    def tags(self) -> dict[Tag, int]:
        """Return every wheel tag that the machine takes, with its rank: the lower the better."""
        platforms = []
        for minor in range(GLIBC, 4, -1):
            platforms.append(f"manylinux_2_{minor}_{self.machine}")
            platforms += [f"{name}_{self.machine}" for name, glibc in LEGACY.items() if glibc == minor]
        platforms.append(f"linux_{self.machine}")
        tag = f"cp{self.python[0]}{self.python[1]}"
        found = [*cpython_tags(self.python, [tag], platforms), *compatible_tags(self.python, tag, platforms)]
        return {tag: rank for rank, tag in reversed(list(enumerate(found)))}

    def environments(self) -> list[dict[str, str | AbstractSet[str]]]:
        """Return what markers are judged by (PEP 508): with the first and the last release of its Python."""
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


def requirements(text: str, target: Target) -> Iterator[tuple[Requirement, frozenset[str]]]:
    """Return each requirement of a hash-locked set that holds on `target`, with its hashes.

    Raises PinError for a requirement without a hash or without an exact version.
    """
    environments = target.environments()
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].strip()
        if not words:
            continue
        requirement = Requirement(words.partition("--hash")[0].strip())
        hashes = frozenset(HASH.findall(words))
        if not hashes or not re.fullmatch(r"==[^*,]+", str(requirement.specifier)):
            raise PinError(
                f"{requirement.name} is not locked", f"{words[:80]} has no hash or no exact version", "./inv pins.lock"
            )
        if requirement.marker is None or any(requirement.marker.evaluate(one) for one in environments):
            yield requirement, hashes


def choose(
    requirement: Requirement, hashes: frozenset[str], files: Sequence[DistributionPackage], target: Target
) -> Pick:
    """Return the file of `requirement` that fits `target` best: a wheel, else a source archive.

    Raises PinError if no file with one of `hashes` fits.
    """
    ranks = target.tags()
    best: tuple[int, Pick] | None = None
    for file in files:
        sha256 = (file.digests or {}).get("sha256", "")
        if sha256 not in hashes:
            continue  # first, because an index also lists file names that no tool understands any more
        rank = _rank(file.filename, ranks)
        if rank is not None and (best is None or rank < best[0]):
            best = rank, Pick(requirement.name, file.filename, sha256)
    if best is None:
        raise PinError(
            f"{requirement.name}{requirement.specifier} cannot be brought for {target}",
            f"none of the {len(hashes)} files in the lock fits it, or the index no longer has them",
            "./inv pins.lock",
        )
    return best[1]


def _rank(filename: str, ranks: Mapping[Tag, int]) -> int | None:
    if filename.endswith(".whl"):
        return min((ranks[tag] for tag in parse_wheel_filename(filename)[3] if tag in ranks), default=None)
    return len(ranks) if filename.endswith((".tar.gz", ".zip")) else None


def picks(lock: Path, target: Target) -> list[Pick]:
    """Return the files of the set at `lock` for `target`, sorted by name. Asks the index once for each lock and target.

    Raises PinError (see above) and FetchError.
    """
    sha256 = sha256_file(lock)
    place = paths.cache() / "picks" / f"{lock.stem}-{target}-{sha256[:12]}.json"
    inputs = {"lock": sha256, "target": str(target), "glibc": f"2.{GLIBC}"}

    def make(temporary: Path) -> Made:
        """Ask the index. Raises PinError and FetchError."""
        with client() as http:
            chosen = _ask(lock.read_text(encoding="utf-8"), target, http)
        write_json(temporary, [asdict(pick) for pick in chosen])
        return Made({place.name: sha256_file(temporary)})

    once(place, "picks", inputs, make)
    return [Pick(**pick) for pick in json.loads(place.read_text(encoding="utf-8"))]


def _ask(text: str, target: Target, http: httpx.Client) -> list[Pick]:
    found = [
        choose(requirement, hashes, project_page(requirement.name, http).packages, target)
        for requirement, hashes in requirements(text, target)
    ]
    return sorted(found, key=lambda pick: pick.filename)
