"""Read files of an upstream release from its archive without unpacking; few of its ten thousand files are needed.

Files that were read are cached under the archive's sha256 and checked by hash on every use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from packaging.version import InvalidVersion, Version

from sparkforge.core import paths
from sparkforge.core.errors import InputError, NetworkError
from sparkforge.core.files import read_json, write_atomic, write_json
from sparkforge.patching.hunks import Content, digest
from sparkforge.pins import Component, Pins
from sparkforge.pins.index import client, project_page
from sparkforge.sources import archive, fetch, offline

Reader: TypeAlias = Callable[[str], Content]  # path inside the tree → bytes, or None if there is no such file


@dataclass(frozen=True)
class Release:
    """One archive of one version; `pinned` tells whether its hash is in pins.toml."""

    package: str
    version: str
    filename: str
    sha256: str
    pinned: bool
    size: int | None = None  # bytes, as pinned

    def __str__(self) -> str:
        return self.filename + ("" if self.pinned else " (unpinned, hash as the index gives it)")

    @property
    def top(self) -> str | None:
        """The folder that holds everything in the archive; None for a wheel, which has none."""
        return self.filename.removesuffix(".tar.gz") if self.filename.endswith(".tar.gz") else None


def release(table: Pins, component: Component, version: str | None = None) -> Release:
    """Return the archive of `component` in `version` (None: the pinned one).

    A version that pins.toml lacks is searched among earlier downloads, then on the package index. Such a release is
    only read, never built. Raises NetworkError if the index has no such version, InputError for an image.
    """
    package = component.package
    if package is None:
        raise InputError("an image has no patches", "it is no package", "name a package's queue", code="input.pins")
    version = version or component.version
    for pinned in (component, *table.components()):
        if (pinned.package, pinned.version) == (package, version):
            names = sorted(pinned.files, key=lambda name: not name.endswith(".tar.gz"))
            sha256, size = pinned.files[names[0]], pinned.size_of(names[0])
            return Release(package, version, names[0], sha256, pinned=True, size=size)
    filename = f"{package.replace('-', '_')}-{version}.tar.gz"  # PEP 625
    downloads = list((paths.cache() / "files").glob(f"*/{filename}"))  # `fetch` checks their hash again
    sha256 = downloads[0].parent.name if len(downloads) == 1 else _listed(package, filename)
    return Release(package, version, filename, sha256, pinned=False)


def reader(release: Release, wanted: Iterable[str]) -> Reader:
    """Return a reader of the files `wanted` of a release. Raises the errors of `fetch`, and IntegrityError."""
    folder = paths.cache() / "members" / release.sha256
    cached = _kept(folder)
    if missing := [path for path in wanted if path not in cached]:
        contents = archive.read_files(
            fetch.fetch(release.package, release.filename, release.sha256, release.size), release.top, set(missing)
        )
        for content in contents.values():
            if content is not None:
                write_atomic(folder / str(digest(content)), content)
        cached |= contents
        write_json(folder / "index.json", {path: digest(content) for path, content in cached.items()})
    return cached.__getitem__


def _kept(folder: Path) -> dict[str, Content]:
    """Return the cached files of earlier runs whose hash is right."""
    try:
        index: Mapping[str, str | None] = read_json(folder / "index.json")
        cached = {path: (folder / sha256).read_bytes() if sha256 and (folder / sha256).is_file() else None
                for path, sha256 in index.items()}  # fmt: skip
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return {path: content for path, content in cached.items() if digest(content) == index[path]}


def _order(version: str) -> tuple[bool, Version]:
    """Return a sort key for a version in the index; invalid versions come first."""
    try:
        return True, Version(version)
    except InvalidVersion:
        return False, Version("0")


def _listed(package: str, filename: str) -> str:
    """Return the hash that the package index gives for a file. Raises NetworkError if it lists none."""
    if offline.folder():
        raise NetworkError(
            f"cannot fetch {filename}",
            "it is not in the bundle",
            "run this where there is a network",
            code="network.fetch",
        )
    with client() as http:
        listed = project_page(package, http).packages
    for entry in listed:
        if entry.filename == filename and (sha256 := (entry.digests or {}).get("sha256")):
            return sha256
    sources = sorted({entry.version for entry in listed if entry.package_type == "sdist" and entry.version}, key=_order)
    raise NetworkError(
        f"cannot find {filename}", f"the package index has no source archive of {package} in that version",
        f"name one of its versions: {', '.join(sources[-8:])}", code="network.fetch"
    )  # fmt: skip
