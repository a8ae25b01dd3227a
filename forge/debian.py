"""Debian packages by hash: `deploy/debian.toml` → `locks/debian/DEVICE-STAGE-ARCH.txt`, resolved by apt itself.

Debian's archive drops a version when the next one comes, so a version alone is no pin (docs/decisions/0005). Each line
of a lock is a sha256 and a path that holds both below the archive's mirror and below a snapshot of its day; see
`deploy/install-debs`. The closure holds what the base has too: libc6-dev must meet exactly its libc6.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.console import say
from sparkforge.errors import FetchError
from sparkforge.files import write_atomic
from sparkforge.paths import ROOT
from sparkforge.process import run

TABLE = ROOT / "deploy/debian.toml"
LOCKS = ROOT / "locks/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
ARCHITECTURES = ("amd64", "arm64")
STAGES = ("runtime", "build", "source", "dev")
NETWORK = "check the network, then run the same command again"
_URI = re.compile(r"^'(?P<url>\S+)' \S+ \d+ SHA256:(?P<sha256>[0-9a-f]{64})$")


@dataclass(frozen=True)
class DebianSet:
    """What one device's image adds in one stage: the suite, and the packages asked for, earlier stages' included."""

    device: str
    stage: str
    suite: str
    wanted: tuple[str, ...]

    def path(self, architecture: str) -> Path:
        """Return the place of its lock for `architecture`, in Debian's words (amd64, arm64)."""
        return LOCKS / f"{self.device}-{self.stage}-{architecture}.txt"


@dataclass(frozen=True)
class Deb:
    """One package file: its sha256 and its path below an archive, such as debian/pool/main/t/tini/tini_….deb."""

    sha256: str
    path: str


def sets(table: Path = TABLE) -> list[DebianSet]:
    """Return every set of the table, runtime before build."""
    devices: dict[str, Any] = tomllib.loads(table.read_text(encoding="utf-8"))
    made = []
    for device, entry in devices.items():
        wanted: tuple[str, ...] = ()
        for stage in STAGES:
            wanted += tuple(entry.get(stage, ()))
            made.append(DebianSet(device, stage, entry["suite"], wanted))
    return made


def read(path: Path) -> list[Deb]:
    """Return the packages of a lock."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [Deb(*words) for words in lines]


def lock_all() -> list[Path]:
    """Resolve every set for every architecture with apt, and write the locks. Raises FetchError."""
    written = []
    with tempfile.TemporaryDirectory(prefix="sparkforge-apt-") as folder:
        for suite in sorted({each.suite for each in sets()}):
            for architecture in ARCHITECTURES:
                work = Path(folder) / f"{suite}-{architecture}"
                apt = _apt(work, suite, architecture)
                chosen = [each for each in sets() if each.suite == suite]
                written += [_lock(each, architecture, apt, earlier) for each, earlier in _with_earlier(chosen)]
    return written


@functools.cache
def mirror() -> str:
    """Return the archive to resolve from: DEBIAN_MIRROR, else what this machine's apt uses. Raises FetchError."""
    told = run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], check=False).stdout.split()
    found = [uri.removesuffix("/debian/") for uri in told if uri.endswith("/debian/")]
    if chosen := os.environ.get("DEBIAN_MIRROR", "") or next(iter(found), ""):
        return chosen.rstrip("/")
    raise FetchError(
        "no Debian archive is known", "apt on this machine has none", "DEBIAN_MIRROR=URL ./inv pins.debian"
    )


def _with_earlier(chosen: list[DebianSet]) -> Iterator[tuple[DebianSet, DebianSet | None]]:
    """Yield each set with the set of the stage before it, whose packages it need not name again."""
    for each in chosen:
        before = [
            one for one in chosen if one.device == each.device and STAGES.index(one.stage) < STAGES.index(each.stage)
        ]
        yield each, before[-1] if before else None


def _apt(work: Path, suite: str, architecture: str) -> list[str]:
    """Make a private apt that knows `suite` and an empty machine; return the words that start it."""
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
    words = ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    run([*words, "update"], fix=NETWORK)
    return words


def _lock(each: DebianSet, architecture: str, apt: list[str], earlier: DebianSet | None) -> Path:
    found = _closure(each, apt)
    if earlier:
        before = set(_closure(earlier, apt))
        found = [deb for deb in found if deb not in before]
    day = datetime.now(UTC).strftime("%Y%m%dT000000Z")
    known = each.path(architecture)
    if known.exists() and sorted(read(known), key=lambda deb: deb.path) == found:
        return known  # nothing moved: keep its day, whose snapshot holds these files
    head = f"# Made from deploy/debian.toml by `./inv pins.debian`; do not edit.\n# snapshot {day}\n"
    write_atomic(known, (head + "".join(f"{deb.sha256}  {deb.path}\n" for deb in found)).encode())
    return known


def _closure(each: DebianSet, apt: list[str]) -> list[Deb]:
    """Return every package that `each` needs on an empty machine, sorted by path."""
    told = run([*apt, "install", "--print-uris", "--yes", *each.wanted], fix=NETWORK).stdout.splitlines()
    found = [_deb(line) for line in told]
    return sorted(found, key=lambda deb: deb.path)


def _deb(line: str) -> Deb:
    match = _URI.match(line)
    if match is None:
        raise FetchError("cannot lock a Debian package", f"apt said {line!r}, without a sha256", NETWORK)
    path = match["url"].removeprefix(f"{mirror()}/")
    return Deb(match["sha256"], path.replace("%2b", "+").replace("%7e", "~"))


def show() -> None:
    """Lock every set and say what there is."""
    for path in lock_all():
        say(f"{path.relative_to(ROOT)}: {len(read(path))} packages")
