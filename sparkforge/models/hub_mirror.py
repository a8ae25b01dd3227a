"""A folder as the source of a checkpoint: a copy of one, a folder of repositories, or a Hugging Face cache."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from sparkforge.core.console import say
from sparkforge.core.errors import NetworkError
from sparkforge.core.files import CHUNK, sha256_file
from sparkforge.core.paths import typed
from sparkforge.models.hub_source import NOTE, UNREADABLE, RemoteFile

SMALL = 64 << 20  # bytes; larger files are weights, whose structure is checked
BLOB = re.compile(r"[0-9a-f]{64}")  # in a Hugging Face cache, a large file is a link to a blob named by its sha256


class Mirror:
    """A checkpoint that lies in a folder, perhaps on another machine's disk."""

    def __init__(self, folder: Path, repository: str, revision: str) -> None:
        """Find the checkpoint. Raises NetworkError if the folder holds none of this repository and revision."""
        self.folder = _find(typed(folder).absolute(), repository, revision)
        self.repository, self.name = repository, f"{repository} in {folder}"
        recorded, self.hashes = self._note()
        self.revision = recorded or revision or self.folder.name
        if revision and recorded and recorded != revision:
            raise NetworkError(
                f"{self.folder} holds another revision of {repository}",
                f"it is {recorded}",
                f"leave out --revision {revision}",
                code="network.fetch",
            )
        if not self.hashes:
            say(f"{self.folder} names no hashes ({NOTE}): the files' structure is checked, not their bytes")

    def files(self) -> list[RemoteFile]:
        """Return every file of the folder, with the sha256 that its note or its link's target names.

        A small file without either is hashed.
        """
        files = [path for path in sorted(self.folder.iterdir()) if path.is_file() and path.name != NOTE]
        return [RemoteFile(path.name, path.stat().st_size, self._digest(path)) for path in files]

    def fetch(self, file: RemoteFile, part: Path, advance: Callable[[int], None]) -> None:
        """Copy what `part` lacks. Raises NetworkError if the folder cannot be read."""
        try:
            with (self.folder / file.name).open("rb") as source, part.open("ab") as copy:
                source.seek(copy.tell())
                while data := source.read(CHUNK):
                    copy.write(data)
                    advance(len(data))
        except InterruptedError:
            raise
        except OSError as error:
            if error.filename is None:  # our own disk: full, most likely; the caller names that
                raise
            raise NetworkError(
                f"cannot copy {file.name}", str(error), f"ls -l {self.folder}", code="network.fetch"
            ) from error

    def _digest(self, path: Path) -> str:
        if path.name in self.hashes:
            return f"sha256:{self.hashes[path.name]}"
        target = path.resolve().name
        if path.is_symlink() and BLOB.fullmatch(target):
            return f"sha256:{target}"
        return f"sha256:{sha256_file(path)}" if path.stat().st_size < SMALL else ""

    def _note(self) -> tuple[str, dict[str, str]]:
        """Return the revision and the hashes that an earlier `model.fetch` noted; nothing if there is no note."""
        note = self.folder / NOTE
        if not note.exists():
            return "", {}
        try:
            value = json.loads(note.read_text(encoding="utf-8"))
            hashes = {name: str(entry["sha256"]) for name, entry in value["files"].items()}
            if strange := [sha256 for sha256 in hashes.values() if not BLOB.fullmatch(sha256)]:
                raise ValueError(f"{strange[0][:80]!r} is no sha256")
            return str(value["revision"]), hashes
        except UNREADABLE as error:
            raise NetworkError(
                f"{note} cannot be read",
                repr(error)[:300],
                f"rm {note}   # its hashes are then not known",
                code="network.fetch",
            ) from error


def _find(folder: Path, repository: str, revision: str) -> Path:
    owner, _, name = repository.rpartition("/")
    cache = folder / f"models--{owner}--{name}" / "snapshots"
    snapshots = [path for path in cache.glob("*") if not revision or path.name == revision] if cache.is_dir() else []
    newest = sorted(snapshots, key=lambda path: path.stat().st_mtime)[-1:]
    for candidate in (folder, folder / owner / name, folder / name, *newest):
        if (candidate / "config.json").is_file():
            return candidate
    raise NetworkError(
        f"{folder} holds no {repository}",
        f"there is no config.json in it, in {owner}/{name} or in models--{owner}--{name}/snapshots",
        f"ls {folder}",
        code="network.fetch",
    )
