"""A patch queue on disk: `patches/<upstream>-<version>/series` and its patches with DEP-3 headers.

A patch that is the same in several releases is in `patches/common/`; each series names it as `../common/FILE`.

DEP-3 is Debian's format for patch headers (https://dep-team.pages.debian.net/deps/dep3/): `Field: value`, continued by
lines that begin with a space, closed by a line `---`. `Drop-when` is our own field: one condition per line. If
any of them holds, upstream no longer needs the patch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from sparkforge.core.errors import PatchError
from sparkforge.core.files import write_atomic
from sparkforge.core.paths import ROOT
from sparkforge.patching.hunks import Content, FileChange, parse, read_files, refuse, refuse_folders
from sparkforge.pins import Component, Pins
from sparkforge.sources.archive import unharmful

PATCHES = ROOT / "patches"

FIELDS = ("Description", "Origin", "Bug", "Forwarded", "Last-Update", "Drop-when")
DIRECTORY = re.compile(r"(?P<upstream>[a-z][a-z0-9_-]*?)-(?P<version>\d[0-9A-Za-z.+]*)")
PATCH_NAME = re.compile(r"\d{4}-[a-z0-9]+(-[a-z0-9]+)*\.patch")
FIELD = re.compile(r"(?P<name>[A-Za-z][A-Za-z-]*): *(?P<value>.*)")
COMMON = "../common/"  # prefix of a line of `series` for a patch that several queues share
CONDITION = re.compile(r"(?P<kind>contains|lacks) (?P<path>\S+) (?P<text>\S.*)")


@dataclass(frozen=True)
class Condition:
    """One line of `Drop-when`: the unpatched upstream file at `path` contains, or lacks, `text`."""

    kind: str
    path: str
    text: str

    def holds_for(self, content: bytes | None) -> bool:
        """Evaluate the condition on the bytes of the unpatched file at `path`; None: there is no such file."""
        return (self.text.encode() in (content or b"")) == (self.kind == "contains")

    def __str__(self) -> str:
        return f"{self.kind} {self.path} {self.text}"


@dataclass(frozen=True)
class Patch:
    """One patch: its file name, sha256 of its bytes, DEP-3 header, changes, and when to drop it."""

    name: str
    sha256: str
    header: Mapping[str, str]
    changes: tuple[FileChange, ...]
    drop_when: tuple[Condition, ...]
    text: bytes  # the whole file
    entry: str  # its line in `series`

    @classmethod
    def load(cls, file: Path) -> Patch:
        """Read one patch file. Raises PatchError unless it is a plain text diff with a complete header."""
        if not PATCH_NAME.fullmatch(file.name):
            raise refuse(file.name, "is not named NNNN-imperative-subject.patch")
        data = file.read_bytes()
        if b"\0" in data:
            raise refuse(file.name, f"holds a NUL at byte {data.index(0)}, and a patch is text")
        if b"\r" in data:
            raise refuse(file.name, "has carriage returns; an editor or a mail program damaged its line ends")
        try:
            head, separator, diff = data.decode().partition("\n---\n")
        except UnicodeDecodeError as error:
            raise refuse(file.name, f"is not UTF-8 at byte {error.start}") from error
        if not separator:
            raise refuse(file.name, "has no line `---` between its header and its diff")
        header, conditions = _header(file.name, head), []
        for line in header["Drop-when"].splitlines():
            if not (match := CONDITION.fullmatch(line)):
                why = f"has a Drop-when that is not `contains PATH TEXT` or `lacks PATH TEXT`: {line}"
                raise refuse(file.name, why)
            if not unharmful(match["path"]):
                raise refuse(file.name, f"has a Drop-when for {match['path']!r}, which is not a path inside the tree")
            conditions.append(Condition(match["kind"], match["path"], match["text"]))
        entry, sha256 = COMMON * (file.parent.name == "common") + file.name, hashlib.sha256(data).hexdigest()
        return cls(file.name, sha256, header, parse(file.name, diff), tuple(conditions), data, entry)


@dataclass(frozen=True)
class Queue:
    """The patches for one version of one upstream, in the order of its series."""

    upstream: str
    version: str
    patches: tuple[Patch, ...]
    installed: Mapping[str, str] = field(default_factory=dict)  # a source archive's folder → its installed path

    @classmethod
    def load(cls, directory: Path) -> Queue:
        """Read `directory`, named <upstream>-<version>. Raises PatchError if any part of it is malformed."""
        name = DIRECTORY.fullmatch(directory.name)
        if not name:
            raise _bad_series(directory, "the directory is not named <upstream>-<version>")
        patches = tuple(Patch.load(directory / entry) for entry in _series(directory))
        file = directory / "installed"
        lines = _lines(directory, file) if file.is_file() else []
        pairs = [line.split() for line in lines if line and not line.startswith("#")]
        for parts in pairs:
            if len(parts) != 2 or "/" in parts[0] or not all(map(unharmful, parts)):
                why = f"`installed` has a line other than `FOLDER FOLDER/INSIDE`: {' '.join(parts)}"
                raise _bad_series(directory, why)
        return cls(name["upstream"], name["version"], patches, {parts[0]: parts[1] for parts in pairs})

    def for_tree(self, tree: Path) -> Queue:
        """Return this queue with the paths of `tree`, because an installed package may have other folders."""
        return self._moved(lambda folder: (tree / folder).exists())

    def for_files(self, names: Collection[str]) -> Queue:
        """Return this queue with the paths of an archive with the files `names` (see `for_tree`)."""
        return self._moved(lambda folder: any(name.startswith(f"{folder}/") for name in names))

    def _moved(self, holds: Callable[[str], bool]) -> Queue:
        moves = {old: new for old, new in self.installed.items() if not holds(old) and holds(new)}

        def new_path(path: str) -> str:
            """Return `path` with its top folder replaced, such as `lib/x.py` for `src/x.py`."""
            folder, slash, rest = path.partition("/")
            return moves.get(folder, folder) + slash + rest

        def moved(patch: Patch) -> Patch:
            changes = tuple(replace(change, path=new_path(change.path)) for change in patch.changes)
            conditions = tuple(replace(condition, path=new_path(condition.path)) for condition in patch.drop_when)
            return replace(patch, changes=changes, drop_when=conditions)

        return replace(self, patches=tuple(map(moved, self.patches))) if moves else self

    def apply(self, contents: Mapping[str, Content], others: Iterable[str] = ()) -> dict[str, Content]:
        """Return `contents` (path → bytes) after every patch, in memory and with fuzz 0.

        `others` are further files of the tree. Raises PatchError, also if a path would be both a file and a folder.
        """
        after = dict(contents)
        for patch in self.patches:
            for change in patch.changes:
                after[change.path] = change.apply(after[change.path])
        kept = {path for path, content in after.items() if content is not None}
        refuse_folders(self.name, kept | (set(others) - after.keys()))
        return after

    def apply_to(self, tree: Path) -> None:
        """Apply every patch to the files in `tree`, a private copy. Raises PatchError before it writes anything."""
        queue = self.for_tree(tree)
        before = read_files(tree, queue.paths)
        near = [file for path in before for file in (*(tree / path).glob("*"), *(tree / path).parents)]
        others = [str(file.relative_to(tree)) for file in near if file.is_relative_to(tree) and file.is_file()]
        for path, content in queue.apply(before, others).items():
            if content is None:
                (tree / path).unlink()
            elif content != before[path]:
                write_atomic(tree / path, content)

    @property
    def name(self) -> str:
        """The name of the queue's folder."""
        return f"{self.upstream}-{self.version}"

    @property
    def sha256(self) -> str:
        """Hex sha256 over upstream, version, and each patch's name and hash, in order."""
        lines = [f"{self.upstream} {self.version}", *(f"{patch.sha256} {patch.name}" for patch in self.patches)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file that a patch touches, sorted, relative to the tree."""
        return tuple(sorted({change.path for patch in self.patches for change in patch.changes}))


def queues(table: Pins, stack: str, patches: Path = PATCHES) -> list[tuple[Component, Queue]]:
    """Return the queues that a stack's components name, each with its component.

    Queues of source archives come first. A queue of both an archive and a wheel is listed with the archive. Raises
    InputError for an unknown stack, PatchError for a malformed queue.
    """
    folders: dict[str, Component] = {}
    for component in sorted(table.stack(stack).components.values(), key=lambda component: component.kind != "sdist"):
        if component.patches:
            folders.setdefault(component.patches, component)
    return [(component, Queue.load(patches / name)) for name, component in folders.items()]


def _series(directory: Path) -> list[str]:
    """Return the lines of `series`. It must name every patch of the folder once, in rising order."""
    file = directory / "series"
    if not file.is_file():
        raise _bad_series(directory, "there is no file `series`")
    lines = (line.partition("#")[0].strip() for line in _lines(directory, file))
    names = [line for line in lines if line]
    own = {path.name for path in directory.glob("*.patch")}
    present = own | {COMMON + path.name for path in (directory / COMMON).glob("*.patch")}
    rising = sorted(set(names), key=lambda name: name.removeprefix(COMMON))
    checks = (
        (not names, "`series` names no patch"),
        ([name for name in names if name not in present], "`series` names files that are not there"),
        (sorted(own - set(names)), "these patches are not in `series`"),
        (names != rising, "the patches in `series` are not in rising order, or one is named twice"),
    )
    for wrong, reason in checks:
        if wrong:
            raise _bad_series(directory, f"{reason}: {', '.join(wrong)}" if isinstance(wrong, list) else reason)
    return names


def _lines(directory: Path, file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise _bad_series(directory, f"`{file.name}` is not UTF-8 at byte {error.start}") from error


def _header(patch: str, text: str) -> dict[str, str]:
    """Read DEP-3 fields; the lines of a continued value are joined by line breaks."""
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        field = FIELD.fullmatch(line)
        if line.startswith(" ") and name:
            fields[name] = f"{fields[name]}\n{line.strip()}".strip()
        elif field and field["name"] not in fields:
            name = field["name"]
            fields[name] = field["value"].strip()
        else:
            raise refuse(patch, f"has a header line that is not a DEP-3 field, or repeats one: {line!r}")
    if missing := [name for name in FIELDS if not fields.get(name)]:
        raise refuse(patch, f"lacks the header fields {', '.join(missing)}")
    try:
        date.fromisoformat(fields["Last-Update"])
    except ValueError as error:
        raise refuse(patch, f"has a Last-Update that is not a date: {fields['Last-Update']}") from error
    return fields


def _bad_series(directory: Path, reason: str) -> PatchError:
    fix = "git checkout -- patches   # restores it; or correct its series"
    return PatchError(f"the patch queue {directory} cannot be used", reason, fix, code="patch.format")
