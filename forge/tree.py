"""A tree of files that is moved from one recorded state to another, whole or not at all.

A tree may hold several upstreams (vLLM and FlashInfer share a site-packages), each with a record and a store. Beside
the record `.sparkforge-patches.<upstream>.json` lies `.sparkforge-patches.<upstream>.d/`: each patched file as it was
before the queue, named by its sha256, so that a tree can be put back when the patches of that time are gone.
A move is: store every byte that it needs, write down what it will do (the journal), replace file by file, write the
record, remove the journal. Whoever finds a journal carries the move to its end; without one nothing was changed yet.
No file is written in place: files of an installed package may be hard links into an installer's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sparkforge.errors import BusyError, PatchFormatError, TreeModifiedError, UsageError
from sparkforge.files import fsync_directory, write_atomic, write_json

PREFIX = ".sparkforge-patches"  # `validate` looks for the records by this name
JOURNAL = "journal.json"
SCHEMA = 1

Content: TypeAlias = bytes | None  # None: there is no such file
_T = TypeVar("_T")


def record_name(upstream: str) -> str:
    """Name of the file at a tree's root that tells of the queue for `upstream`."""
    return f"{PREFIX}.{upstream}.json"


def store_name(upstream: str) -> str:
    """Name of the folder at a tree's root that holds the files of `upstream` as they were before its queue."""
    return f"{PREFIX}.{upstream}.d"


def upstreams(root: Path) -> list[str]:
    """Return the upstreams whose queue the tree at `root` holds, or of which a killed run left something; sorted."""
    found = [*root.glob(record_name("*")), *root.glob(store_name("*"))]
    return sorted({path.name.removeprefix(f"{PREFIX}.").rpartition(".")[0] for path in found})


def digest(content: Content) -> str | None:
    """Hex sha256 of a file's bytes; None for a file that is not there."""
    return None if content is None else hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Change:
    """Hex sha256 of one file before and after a move; None where there is no such file."""

    before: str | None
    after: str | None


@dataclass(frozen=True)
class Record:
    """What a tree holds: a queue's identity, its patches (name, sha256), and what they did to which file."""

    upstream: str
    version: str
    queue_sha256: str
    patches: tuple[tuple[str, str], ...]
    files: Mapping[str, Change]

    def to_json(self) -> dict[str, Any]:
        """The record's form on disk; `validate` reads it."""
        return {
            "schema": SCHEMA,
            "upstream": self.upstream,
            "version": self.version,
            "queue_sha256": self.queue_sha256,
            "patches": [{"name": name, "sha256": sha256} for name, sha256 in self.patches],
            "files": {path: asdict(change) for path, change in self.files.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """Read what `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        if value["schema"] != SCHEMA:
            raise ValueError(f"its schema is {value['schema']}, and this Sparkforge reads {SCHEMA}")
        return cls(
            value["upstream"],
            value["version"],
            value["queue_sha256"],
            tuple((patch["name"], patch["sha256"]) for patch in value["patches"]),
            _changes(value["files"]),
        )


def read(root: Path, path: str) -> Content:
    """Return the bytes of the file at `path` in `root`. Raises PatchFormatError at a symbolic link on the way to it."""
    place = root
    for part in path.split("/"):
        place /= part
        if place.is_symlink():
            raise PatchFormatError(
                f"{path} in {root} cannot be patched",
                f"{place} is a symbolic link and may lead elsewhere",
                "install with copies instead of links (UV_LINK_MODE=copy), then run the same command again",
            )
    with suppress(FileNotFoundError, NotADirectoryError):
        return place.read_bytes()
    return None


class Tree:
    """A directory that a queue for `upstream` is applied to: an unpacked source archive, or a site-packages."""

    def __init__(self, root: Path, upstream: str) -> None:
        self.root = root.resolve()
        self.record_file = self.root / record_name(upstream)
        self.store = self.root / store_name(upstream)
        if not self.root.is_dir():
            raise UsageError(f"{root} cannot be patched", "it is no directory", "name an unpacked source tree")

    def read(self, path: str) -> Content:
        """Return the bytes of the file at `path`. Raises PatchFormatError at a symbolic link on the way to it."""
        return read(self.root, path)

    @property
    def record(self) -> Record | None:
        """The record of the queue that the tree holds; None if it holds none."""
        value = self._load(self.record_file)
        return None if value is None else self._understood(self.record_file.name, lambda: Record.from_json(value))

    @property
    def interrupted(self) -> bool:
        """Whether a move was begun and not ended."""
        return (self.store / JOURNAL).exists()

    def edited(self, files: Mapping[str, Change]) -> list[str]:
        """Return the paths whose bytes are neither those before nor those after the change."""
        return [path for path, change in files.items() if digest(self.read(path)) not in (change.before, change.after)]

    def original(self, path: str, wanted: str | None) -> Content:
        """Return the bytes of `path` that have the hash `wanted`, from their place or from the store."""
        if wanted is None:
            return None
        stored = self.store / wanted
        for content in (self.read(path), stored.read_bytes() if stored.is_file() else None):
            if digest(content) == wanted:
                return content
        raise TreeModifiedError(
            f"{self.root} cannot be changed",
            f"the stored bytes of {path}, {stored}, are gone or were changed",
            f"remove {self.root} and unpack or install it afresh",
        )

    def require_unedited(self, files: Mapping[str, Change]) -> None:
        """Raise TreeModifiedError, with the commands that put them back, if any of `files` was edited by hand."""
        if not (edited := self.edited(files)):
            return
        words = [
            ["rm", self.root / path]
            if files[path].before is None
            else ["cp", self.store / str(files[path].before), self.root / path]
            for path in edited
        ]
        raise TreeModifiedError(
            f"{self.root} was edited by hand",
            f"not as the patch queue left them: {', '.join(edited)}",
            "keep a copy of your edits, then " + " && ".join(shlex.join(map(str, command)) for command in words),
        )

    def move(self, target: Mapping[str, Content], record: Record | None) -> None:
        """Give every file of `target` its content, and the tree its `record` (None: none), in one step."""
        before = {path: self.read(path) for path in target}
        self.store.mkdir(exist_ok=True)
        fsync_directory(self.root)
        for path, content in before.items():
            self._keep(content, self._mode(self.root / path))
        for content in target.values():
            self._keep(content, 0o644)
        files = {path: asdict(Change(digest(before[path]), digest(target[path]))) for path in target}
        journal = {"schema": SCHEMA, "files": files, "record": record.to_json() if record else None}
        write_json(self.store / JOURNAL, journal)
        self.finish()

    def finish(self) -> None:
        """Carry a begun move to its end, and remove what a killed run may have left."""
        journal = self._load(self.store / JOURNAL)
        if journal is not None:
            files, record = self._understood(JOURNAL, lambda: (_changes(journal["files"]), journal["record"]))
            self.require_unedited(files)
            target = {path: self.original(path, change.after) for path, change in files.items()}
            for path, content in target.items():
                self._replace(path, content)
            if record is None:
                self.record_file.unlink(missing_ok=True)
            else:
                write_json(self.record_file, record)
            (self.store / JOURNAL).unlink()
        self._sweep()

    @property
    def settled(self) -> bool:
        """Whether no run was killed here, not even while it cleaned up after itself."""
        return not self.interrupted and not self._litter()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the tree against other Sparkforge processes; the kernel lets go when this one dies.

        Raises BusyError if another one holds it, UsageError where this user may not write.
        """
        if not os.access(self.root, os.W_OK):
            raise UsageError(
                f"{self.root} cannot be patched",
                "you may not write there",
                "patch a copy or an environment of your own, or run the command as its owner",
            )
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)  # the directory itself: no lock file stays behind
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    f"cannot patch {self.root}",
                    "another Sparkforge process is patching it",
                    "wait for it to end, then run the same command again",
                ) from None
            yield
        finally:
            os.close(handle)

    def _load(self, file: Path) -> Any:
        """Return the JSON value in `file`; None if there is no such file."""
        return self._understood(file.name, lambda: json.loads(file.read_bytes())) if file.exists() else None

    def _understood(self, name: str, read: Callable[[], _T]) -> _T:
        """Return what `read` returns, or raise TreeModifiedError if `name` does not hold what we write there."""
        try:
            return read()
        except (KeyError, TypeError, ValueError) as error:
            raise TreeModifiedError(
                f"{self.root} cannot be judged",
                f"its {name} is no record of this Sparkforge ({error})",
                f"remove {self.root} and unpack or install it afresh",
            ) from error

    def _replace(self, path: str, content: Content) -> None:
        """Give `path` its content, and drop the bytecode that was compiled from the old one."""
        place = self.root / path
        _remove(place.parent.glob(f".{place.name}.*.tmp"))
        # Bytecode is trusted by its source's size and second of change, or unchecked: neither tells old from new.
        _remove((place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"))
        if content is None:
            place.unlink(missing_ok=True)
            self._remove_empty(place.parent)
        elif self.read(path) != content:
            like = place if place.exists() else self.store / str(digest(content))
            write_atomic(place, content, mode=self._mode(like))

    def _keep(self, content: Content, mode: int) -> None:
        """Put bytes into the store under their hash, unless they are there."""
        if content is not None:
            stored = self.store / str(digest(content))
            if not stored.is_file() or stored.read_bytes() != content:
                write_atomic(stored, content, mode=mode)

    def _litter(self) -> list[Path]:
        """Return what no ended run leaves behind: temporary files, and stored bytes that the record does not need."""
        record = self.record
        needed = {change.before for change in record.files.values()} if record else set()
        stored = self.store.iterdir() if self.store.is_dir() else ()
        return [
            *self.root.glob(f".{self.record_file.name}.*.tmp"),
            *(file for file in stored if file.name not in needed),
        ]

    def _sweep(self) -> None:
        _remove(self._litter())
        with suppress(OSError):  # it is not there, or it holds originals
            self.store.rmdir()

    def _remove_empty(self, directory: Path) -> None:
        """Remove `directory` and its parents inside the tree as long as they are empty."""
        with suppress(OSError):
            if (bytecode := directory / "__pycache__").is_dir():
                bytecode.rmdir()
            while directory != self.root:
                directory.rmdir()
                directory = directory.parent

    @staticmethod
    def _mode(file: Path) -> int:
        return stat.S_IMODE(file.stat().st_mode) if file.exists() else 0o644


def _changes(value: Mapping[str, Mapping[str, str | None]]) -> dict[str, Change]:
    return {path: Change(change["before"], change["after"]) for path, change in value.items()}


def _remove(files: Iterable[Path]) -> None:
    for file in list(files):
        file.unlink(missing_ok=True)
