"""A folder as the source of a checkpoint: a copy of one, a folder of repositories, or a Hugging Face cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sparkforge.core.console import say
from sparkforge.core.errors import NetworkError
from sparkforge.core.files import CHUNK, sha256_file
from sparkforge.core.paths import typed
from sparkforge.models.hub_source import NOTE, Note, RemoteFile

SMALL = 64 << 20  # bytes; larger files are weights, whose structure is checked
BLOB = re.compile(r"[0-9a-f]{64}")  # in a Hugging Face cache, a large file is a link to a blob named by its sha256


class Mirror:
    """A checkpoint that lies in a folder, perhaps on another machine's disk."""

    def __init__(self, folder: Path, repository: str, revision: str) -> None:
        """Find the checkpoint. Raises NetworkError for a folder without it, InputError for a note that is malformed."""
        self.folder = _find(typed(folder).absolute(), repository, revision)
        self.repository, self.name = repository, f"{repository} in {folder}"
        note = Note.read(self.folder)
        self.hashes = {name: file.sha256 for name, file in note.files.items()} if note else {}
        recorded = note.revision if note else ""
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
