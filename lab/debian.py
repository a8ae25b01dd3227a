"""`python -m lab.debian`: `deploy/debian.toml` → `locks/debian/DEVICE-STAGE-ARCH.txt`, resolved by apt itself.

Debian's archive drops a version when the next comes, so a version alone is no pin (docs/decisions/0005). Each line of a
lock is a sha256 and a path, which is valid on the archive's mirror and in a snapshot of that day; see
`deploy/install-debs`. The closure includes packages of the base image, because libc6-dev requires exactly its libc6.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.core.console import say
from sparkforge.core.errors import InputError, NetworkError
from sparkforge.core.files import read_text, read_toml, write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, run_unchecked
from sparkforge.core.program import exit_code

TABLE = ROOT / "deploy/debian.toml"
LOCKS = ROOT / "locks/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
ARCHITECTURES = ("amd64", "arm64")
# Each stage, with the stages below it. `cross` is only for machines that build for another architecture.
STAGES: dict[str, tuple[str, ...]] = {
    "runtime": (),
    "build": ("runtime",),
    "source": ("runtime", "build"),
    "dev": ("runtime", "build", "source"),
    "cross": ("runtime", "build"),
}
NETWORK = "check the network, then run the same command again"
_URI = re.compile(r"^'(?P<url>\S+)' \S+ \d+ SHA256:(?P<sha256>[0-9a-f]{64})$")


@dataclass(frozen=True)
class DebianSet:
    """The packages that a stage adds to a device's image: the suite, and the requested packages up to this stage."""

    device: str
    stage: str
    suite: str
    wanted: tuple[str, ...]

    def path(self, architecture: str) -> Path:
        """Return the path of its lock for `architecture`, a name of Debian (amd64, arm64)."""
        return LOCKS / f"{self.device}-{self.stage}-{architecture}.txt"


@dataclass(frozen=True)
class Deb:
    """One package file: its sha256 and its path below an archive, such as debian/pool/main/t/tini/tini_….deb."""

    sha256: str
    path: str


def sets() -> list[DebianSet]:
    """Return every set of the table, runtime before build."""
    devices: dict[str, Any] = read_toml(TABLE)
    return [
        DebianSet(
            device, stage, entry["suite"], tuple(name for part in (*below, stage) for name in entry.get(part, ()))
        )
        for device, entry in devices.items()
        for stage, below in STAGES.items()
    ]


def read(path: Path) -> list[Deb]:
    """Return the packages of a lock. Raises InputError for a line that is not a sha256 and a path."""
    packages = []
    try:
        for line in read_text(path).splitlines():
            if not line.startswith("#"):
                sha256, name = line.split()
                packages.append(Deb(sha256, name))
    except ValueError as error:
        raise InputError(
            f"{path.name} is malformed", str(error), ".venv/bin/python -m lab.debian", code="input.pins"
        ) from error
    return packages


def lock_all() -> list[Path]:
    """Resolve every set for every architecture with apt, and write the locks. Raises NetworkError."""
    written = []
    with tempfile.TemporaryDirectory(prefix="sparkforge-apt-") as folder:
        for suite in sorted({packages.suite for packages in sets()}):
            for architecture in ARCHITECTURES:
                apt = _apt(Path(folder) / f"{suite}-{architecture}", suite, architecture)
                known = {(packages.device, packages.stage): packages for packages in sets() if packages.suite == suite}
                for (device, stage), packages in known.items():
                    below = known[device, STAGES[stage][-1]] if STAGES[stage] else None
                    written.append(_lock(packages, architecture, apt, below))
    return written


@functools.cache
def mirror() -> str:
    """Return the archive to resolve from: DEBIAN_MIRROR, else that of this machine's apt. Raises NetworkError."""
    indexes = run_unchecked(["apt-get", "indextargets", "--format", "$(REPO_URI)"]).stdout.split()
    archives = [uri.removesuffix("/debian/") for uri in indexes if uri.endswith("/debian/")]
    if chosen := os.environ.get("DEBIAN_MIRROR", "") or next(iter(archives), ""):
        return chosen.rstrip("/")
    raise NetworkError(
        "no Debian archive is known",
        "apt on this machine has none",
        "DEBIAN_MIRROR=URL .venv/bin/python -m lab.debian",
        code="network.fetch",
    )


def _apt(work: Path, suite: str, architecture: str) -> list[str]:
    """Set up a private apt with `suite` and no installed packages; return its command."""
    for name in ("lists/partial", "cache/archives/partial", "etc"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    signed = f"deb [arch={architecture} signed-by={KEYRING}] {mirror()}"
    sources = [f"{signed}/debian {suite} main", f"{signed}/debian {suite}-updates main"]
    sources.append(f"{signed}/debian-security {suite}-security main")
    (work / "etc/sources.list").write_text("\n".join(sources) + "\n", encoding="utf-8")
    options = {
        "Dir::State": work, "Dir::State::lists": work / "lists", "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache", "Dir::Etc": work / "etc", "Dir::Etc::sourcelist": work / "etc/sources.list",
        "Dir::Etc::sourceparts": "/dev/null", "Dir::Etc::parts": "/dev/null", "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Architecture": architecture, "APT::Architectures::": architecture, "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "false", "Acquire::Languages": "none", "Acquire::ForceHash": "sha256",
    }  # fmt: skip
    command = ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    run([*command, "update"], fix=NETWORK)
    return command


def _lock(packages: DebianSet, architecture: str, apt: list[str], below: DebianSet | None) -> Path:
    """Write the lock of a set, without the packages of the stage below it."""
    debs = _closure(packages, apt)
    if below:
        present = set(_closure(below, apt))
        debs = [deb for deb in debs if deb not in present]
    lock = packages.path(architecture)
    if lock.exists() and sorted(read(lock), key=lambda deb: deb.path) == debs:
        return lock  # unchanged: keep the date, whose snapshot has these files
    day = datetime.now(UTC).strftime("%Y%m%dT000000Z")
    head = f"# Made from deploy/debian.toml by `.venv/bin/python -m lab.debian`; do not edit.\n# snapshot {day}\n"
    write_atomic(lock, head + "".join(f"{deb.sha256}  {deb.path}\n" for deb in debs))
    return lock


def _closure(packages: DebianSet, apt: list[str]) -> list[Deb]:
    """Return every package that a set needs on an empty machine, sorted by path."""
    lines = run([*apt, "install", "--print-uris", "--yes", *packages.wanted], fix=NETWORK).stdout.splitlines()
    return sorted((_deb(line) for line in lines), key=lambda deb: deb.path)


def _deb(line: str) -> Deb:
    match = _URI.match(line)
    if match is None:
        raise NetworkError(
            "cannot lock a Debian package", f"apt printed {line!r}, without a sha256", NETWORK, code="network.fetch"
        )
    path = match["url"].removeprefix(f"{mirror()}/")
    return Deb(match["sha256"], path.replace("%2b", "+").replace("%7e", "~"))


def main() -> None:
    """Lock every set and print the number of its packages."""
    argparse.ArgumentParser(prog="python -m lab.debian", description=__doc__).parse_args()
    for path in lock_all():
        say(f"{path.relative_to(ROOT)}: {len(read(path))} packages")


if __name__ == "__main__":
    sys.exit(exit_code(main))
