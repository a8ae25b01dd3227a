"""Every source that a build from source needs, unpacked or checked out under the checkout's state, by hash.

A tree lies in `sources/NAME-VERSION/HASH`, where HASH is the first 12 digits of the archive's sha256 or of the commit.
Beside it, `HASH.sha256` lists its files as `sha256sum --check` reads them, and `HASH.manifest.json`, written last, says
what it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from forge import archive, fetch, gitsource, hidden, offline, pins
from forge.cmake import Declared
from forge.manifest import Made, Manifest, once
from forge.pins import Component, GitSource, Pins, Stack
from sparkforge import paths
from sparkforge.console import say
from sparkforge.errors import ArchiveError, FetchError, HashMismatchError, SparkforgeError

UNPACKER = "1"  # raise it when archive.py or cmake.py would make something else of the same archive
DIGITS = 12
ARCHIVE = ".tar.gz"

State = Literal["made", "unchanged", "file", "left out", "missing"]


@dataclass(frozen=True)
class Source:
    """One source: where it lies (None: nowhere), how it came there, and a word on it."""

    name: str
    version: str
    place: Path | None
    state: State
    told: str
    variable: str | None = None  # what a build must be given this place in

    def __str__(self) -> str:
        mark = {"missing": "✗", "left out": "-"}.get(self.state, "✓")
        return f"{mark} {self.name} {self.version}: {self.state} · {self.told}"


def bring(stack: str = "spark", *, table: Pins | None = None, git: bool = True) -> list[Source]:
    """Bring every source of `stack` and return them, those left out on purpose included.

    With `git` False only registry files. A repository that cannot be had is returned as missing (see `require_all`).
    Raises PinError if upstream hides a dependency that pins.toml lacks, and the errors of `fetch` and `archive`.
    """
    table = table or pins.load()
    chosen = table.stack(stack)
    found = [source for name, component in chosen.components.items() for source in _component(name, component, chosen)]
    repositories = [repository(name, pin, git=git) for name, pin in chosen.git.items()]
    return [*found, *repositories]


def show(stack: str = "spark", *, git: bool = True) -> None:
    """Bring every source of `stack` and say where each lies. Raises the errors of `bring` and `require_all`."""
    table = pins.load()
    found = bring(stack, table=table, git=git)
    for source in found:
        say(str(source))
    require_all(found, table.stack(stack).git)


def require_all(found: list[Source], pinned: Mapping[str, GitSource]) -> None:
    """Raise FetchError naming each source that is missing, with the command that brings it by hand."""
    if missing := [source for source in found if source.state == "missing"]:
        raise FetchError(
            f"{len(missing)} of {len(found)} sources are missing",
            "\n        ".join(f"{one.name}: {one.told}" for one in missing),
            "\n        ".join(gitsource.command(one.name, pinned[one.name]) for one in missing),
        )


def unpacked(stack: str = "spark", *, table: Pins | None = None) -> list[tuple[str, Path]]:
    """Return (component, folder) for each archive of `stack`, brought or not."""
    return [
        (name, place(component, file))
        for name, component in (table or pins.load()).stack(stack).components.items()
        for file in component.files
        if component.kind == "sdist" and file.endswith(ARCHIVE)
    ]


def place(component: Component, filename: str) -> Path:
    """Return the folder that an archive of `component` is unpacked to."""
    return home() / filename.removesuffix(ARCHIVE) / component.files[filename][:DIGITS]


def git_place(name: str, pin: GitSource) -> Path:
    """Return the folder that a repository is brought to."""
    return home() / f"{name}-{pin.tag[:DIGITS]}" / pin.commit[:DIGITS]


def home() -> Path:
    """Return the folder of all sources."""
    return paths.state() / "sources"


def _component(name: str, component: Component, stack: Stack) -> Iterator[Source]:
    """Bring a component's source archives; a wheel among their files is brought and left as it is."""
    if component.kind != "sdist":
        return
    for filename, sha256 in component.files.items():
        if filename.endswith(ARCHIVE):
            manifest, made = unpack(component, filename)
            declared = [Declared(**one) for one in manifest.facts["declared"]]
            pinned = {key: pin for key, pin in stack.git.items() if pin.of == name}
            hidden.check(declared, f"{name} {component.version}", pinned)
            yield Source(name, component.version, place(component, filename), "made" if made else "unchanged",
                         f"{len(declared)} hidden dependencies, all pinned")  # fmt: skip
        else:
            path = fetch.fetch(component.package or "", filename, sha256)
            yield Source(name, component.version, path, "file", filename)


def unpack(component: Component, filename: str) -> tuple[Manifest, bool]:
    """Bring and unpack one archive of `component` unless it stands; return its manifest and whether it was made now."""
    target, inputs = place(component, filename), {filename: component.files[filename], "unpacker": UNPACKER}

    def make(temporary: Path) -> Made:
        """Bring and unpack; note what its build files would fetch. Raises FetchError and ArchiveError."""
        file = fetch.fetch(component.package or "", filename, component.files[filename])
        archive.require_room(file, target)
        listing = archive.unpack(file, temporary, top=filename.removesuffix(ARCHIVE))
        archive.write_listing(target, listing)
        declared = [asdict(one) for one in hidden.declared(temporary)]
        return Made({"listing": archive.tree_sha256(listing)}, facts={"declared": declared, "files": len(listing)})

    return once(target, "sources", inputs, make)


def repository(name: str, pin: GitSource, *, git: bool) -> Source:
    """Bring one repository that is needed; report one that is not, or that could not be had."""
    if not pin.needed:
        return Source(name, pin.tag[:DIGITS], None, "left out", pin.why)
    target = git_place(name, pin)
    if not git:
        return Source(name, pin.tag[:DIGITS], None, "left out", "not asked for: registry files only")
    try:
        _, made = _from_bundle(name, pin, target) if offline.folder() else gitsource.bring(name, pin, target)
    except (HashMismatchError, ArchiveError):
        raise
    except SparkforgeError as error:
        return Source(name, pin.tag[:DIGITS], None, "missing", error.why.splitlines()[-1])
    return Source(name, pin.tag[:DIGITS], target, "made" if made else "unchanged", pin.why, pin.src_dir)


def _from_bundle(name: str, pin: GitSource, target: Path) -> tuple[Manifest, bool]:
    """Take a repository's copy out of the bundle. Raises FetchError if the bundle has none of this commit."""
    file = Path(offline.folder() or "") / bundled_name(name, pin)

    def make(temporary: Path) -> Made:
        """Unpack the bundle's copy. Raises FetchError and ArchiveError."""
        if not file.is_file():
            raise FetchError(f"cannot bring {name}", "the bundle has no copy", "see absent in its index.json")
        listing = archive.unpack(file, temporary)
        archive.write_listing(target, listing)
        return Made({"commit": pin.commit, "listing": archive.tree_sha256(listing)}, facts={"bundle": file.name})

    return once(target, "git", gitsource.inputs(pin), make)


def bundled_name(name: str, pin: GitSource) -> str:
    """Return where a bundle holds the copy of a repository."""
    return f"git/{name}-{pin.commit}.tar"
