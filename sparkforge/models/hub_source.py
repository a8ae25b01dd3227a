"""The sources of a checkpoint, the note that a fetch leaves in its folder, and a mirror: a folder as a source.

A mirror is a copy of a checkpoint, a folder with a folder for each repository, or a Hugging Face cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import Field

from sparkforge.core.console import say
from sparkforge.core.errors import InputError, NetworkError, on
from sparkforge.core.files import CHUNK, DocumentError, existing_part, read_bytes, sha256_file
from sparkforge.core.paths import typed
from sparkforge.core.tables import Record, parse_record

NOTE = "sparkforge-model.json"  # our marker, written last, with the revision and every file's hash
SMALL = 64 << 20  # bytes; larger files are weights, of which only the structure is checked
BLOB = re.compile(r"[0-9a-f]{64}")  # in a Hugging Face cache, a large file is a link to a blob named by its sha256


@dataclass(frozen=True)
class RemoteFile:
    """One file: its name, its size in bytes, and its digest as `sha256:hex`, `git:hex` (a blob's id), or empty."""

    name: str
    size: int
    digest: str


class CheckpointSource(Protocol):
    """The source of a checkpoint. Every method raises SparkforgeError for its failures."""

    name: str
    repository: str
    revision: str

    def files(self) -> list[RemoteFile]:
        """Return every file of the source."""

    def fetch(self, file: RemoteFile, part: Path, advance: Callable[[int], None]) -> None:
        """Write the file's bytes to `part`, or only the missing ones; `advance` gets the size of each piece."""


class NotedFile(Record, extra="ignore"):
    """A file of a note."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Note(Record, extra="ignore"):
    """The note of an earlier fetch in a checkpoint's folder: the marker that the folder is ours."""

    repository: str
    revision: str
    files: dict[str, NotedFile]

    @classmethod
    def read(cls, folder: Path) -> Note | None:
        """Return the note in `folder`; None if there is none. Raises InputError if it cannot be read."""
        path = folder / NOTE
        try:
            return parse_record(read_bytes(path), str(path), cls)
        except FileNotFoundError:
            return None
        except (OSError, DocumentError) as error:
            fix = on("ls -l", existing_part(path), "without it the files' hashes are unknown")
            raise InputError(f"{path} cannot be read", str(error), fix, code="input.model") from error


class Mirror:
    """A checkpoint in a folder, which may be on another machine's disk."""

    def __init__(self, folder: Path, repository: str, revision: str) -> None:
        self.folder = _find(typed(folder).absolute(), repository, revision)
        self.repository, self.name = repository, f"{repository} in {folder}"
        note = Note.read(self.folder)
        self.hashes = {name: file.sha256 for name, file in note.files.items()} if note else {}
        recorded = note.revision if note else ""
        self.revision = recorded or revision or self.folder.name
        if revision and recorded and recorded != revision:
            failure = f"{self.folder} holds another revision of {repository}"
            raise NetworkError(failure, f"it is {recorded}", "without --revision", code="network.fetch")
        if not self.hashes:
            say(f"{self.folder} has no hashes ({NOTE}), so the files' structure is checked, not their bytes")

    def files(self) -> list[RemoteFile]:
        """Return every file of the folder with its sha256: from its note or link, or of a small file's content."""
        files = [path for path in sorted(self.folder.iterdir()) if path.is_file() and path.name != NOTE]
        return [RemoteFile(path.name, path.stat().st_size, self._digest(path)) for path in files]

    def fetch(self, file: RemoteFile, part: Path, advance: Callable[[int], None]) -> None:
        """Copy the bytes that `part` lacks. Raises NetworkError if the folder cannot be read."""
        try:
            with (self.folder / file.name).open("rb") as source, part.open("ab") as copy:
                source.seek(copy.tell())
                while data := source.read(CHUNK):
                    copy.write(data)
                    advance(len(data))
        except InterruptedError:
            raise
        except OSError as error:
            if error.filename is None:  # an error of our own disk, which is most likely full; the caller names it
                raise
            failure = f"cannot copy {file.name}"
            raise NetworkError(failure, str(error), on("ls -l", self.folder), code="network.fetch") from error

    def _digest(self, path: Path) -> str:
        if path.name in self.hashes:
            return f"sha256:{self.hashes[path.name]}"
        target = path.resolve().name
        if path.is_symlink() and BLOB.fullmatch(target):
            return f"sha256:{target}"
        return f"sha256:{sha256_file(path)}" if path.stat().st_size < SMALL else ""


def _find(folder: Path, repository: str, revision: str) -> Path:
    owner, _, name = repository.rpartition("/")
    cache = folder / f"models--{owner}--{name}" / "snapshots"
    snapshots = [path for path in cache.glob("*") if not revision or path.name == revision] if cache.is_dir() else []
    newest = sorted(snapshots, key=lambda path: path.stat().st_mtime)[-1:]
    for candidate in (folder, folder / owner / name, folder / name, *newest):
        if (candidate / "config.json").is_file():
            return candidate
    why = f"there is no config.json in it, in {owner}/{name} or in models--{owner}--{name}/snapshots"
    raise NetworkError(f"{folder} holds no {repository}", why, on("ls", existing_part(folder)), code="network.fetch")
