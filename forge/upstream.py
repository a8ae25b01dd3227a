"""Files of an upstream release, straight from its archive: a few of ten thousand are read, so nothing is unpacked.

What was read is kept under the archive's sha256 and checked by hash on every use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from forge import archive, fetch, offline
from forge.index import client, project_page
from forge.pins import Component, Pins
from forge.tree import Content, digest
from sparkforge import paths
from sparkforge.errors import ArchiveError, FetchError, PinError
from sparkforge.files import write_atomic, write_json

Reader: TypeAlias = Callable[[str], Content]  # path inside the tree → bytes, None where there is no such file
LARGEST = 64 << 20  # bytes of one file; the largest that a patch of ours touches has 0.2 MB


@dataclass(frozen=True)
class Release:
    """One archive of one version; `pinned` tells whether its hash stands in pins.toml."""

    package: str
    version: str
    filename: str
    sha256: str
    pinned: bool

    def __str__(self) -> str:
        return self.filename + ("" if self.pinned else " (unpinned, hash as the index gives it)")

    @property
    def top(self) -> str | None:
        """The folder that holds everything in the archive; None for a wheel, which has none."""
        return self.filename.removesuffix(".tar.gz") if self.filename.endswith(".tar.gz") else None


def release(table: Pins, component: Component, version: str | None = None) -> Release:
    """Return the archive of `component` in `version` (None: the pinned one).

    A version that pins.toml lacks is looked for among earlier downloads, then on the package index. Only for looking:
    nothing is built from it. Raises FetchError if the index has no such version, PinError for an image.
    """
    package = component.package
    if package is None:
        raise PinError("an image has no patches", "it is no package", "name a package's queue")
    version = version or component.version
    for pinned in (component, *table.components()):
        if (pinned.package, pinned.version) == (package, version):
            names = sorted(pinned.files, key=lambda name: not name.endswith(".tar.gz"))
            return Release(package, version, names[0], pinned.files[names[0]], pinned=True)
    filename = f"{package.replace('-', '_')}-{version}.tar.gz"  # PEP 625
    return Release(package, version, filename, _seen(filename) or _listed(package, filename), pinned=False)


def reader(one: Release, wanted: Iterable[str]) -> Reader:
    """Return a reader of the files `wanted` of a release. Raises the errors of `fetch`, and ArchiveError."""
    home = paths.cache() / "members" / one.sha256
    kept = _kept(home)
    if missing := [path for path in wanted if path not in kept]:
        found = _members(fetch.fetch(one.package, one.filename, one.sha256), one.top, set(missing))
        for content in found.values():
            if content is not None:
                write_atomic(home / str(digest(content)), content)
        kept |= found
        write_json(home / "index.json", {path: digest(content) for path, content in kept.items()})
    return kept.__getitem__


def _kept(home: Path) -> dict[str, Content]:
    """Return what earlier runs kept and still has the right hash."""
    try:
        index: Mapping[str, str | None] = json.loads((home / "index.json").read_bytes())
    except (OSError, ValueError):
        return {}
    kept = {path: (home / sha256).read_bytes() if sha256 and (home / sha256).is_file() else None
            for path, sha256 in index.items()}  # fmt: skip
    return {path: content for path, content in kept.items() if digest(content) == index[path]}


def _members(file: Path, top: str | None, wanted: set[str]) -> dict[str, Content]:
    """Read the files `wanted` of an archive; every member is checked as for unpacking."""
    found: dict[str, Content] = dict.fromkeys(wanted)
    try:
        for member in archive.members(file):
            path = archive.checked_path(file, member, top)
            if path not in wanted or member.kind != "file":
                continue
            with member.open() as source:
                content = source.read(LARGEST + 1)
            if found[path] is not None or len(content) > LARGEST:
                raise ArchiveError(
                    f"{file.name} is refused", f"{path} stands in it twice, or is too large",
                    f"do not trust it: rm {file}, then the same command again",
                )  # fmt: skip
            found[path] = content
    except archive.MALFORMED as error:
        raise ArchiveError(
            f"{file.name} is refused", f"it is damaged or truncated: {error}", f"rm {file}, then the same command again"
        ) from error
    return found


def _seen(filename: str) -> str | None:
    """Return the hash of an earlier download of that name, if there is exactly one; `fetch` checks it again."""
    found = list((paths.cache() / "files").glob(f"*/{filename}"))
    return found[0].parent.name if len(found) == 1 else None


def _listed(package: str, filename: str) -> str:
    """Return the hash that the package index gives for a file. Raises FetchError if it lists none."""
    if offline.folder():
        raise FetchError(f"cannot bring {filename}", "it is not in the bundle", "run this where there is a network")
    with client() as http:
        listed = project_page(package, http).packages
    for entry in listed:
        if entry.filename == filename and (sha256 := (entry.digests or {}).get("sha256")):
            return sha256
    sources = [entry.version for entry in listed if entry.package_type == "sdist" and entry.version]
    raise FetchError(
        f"cannot find {filename}", f"the package index has no source archive of {package} in that version",
        f"name one of its versions: {', '.join(sources[-8:])}",
    )  # fmt: skip
