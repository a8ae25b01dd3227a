"""A folder as the source of a checkpoint: a copy of one, a folder of repositories, or a Hugging Face cache."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from serve.hub import NOTE, Wanted
from sparkforge.console import say
from sparkforge.errors import FetchError
from sparkforge.files import CHUNK
from sparkforge.paths import typed

BLOB = re.compile(r"[0-9a-f]{64}")  # in a Hugging Face cache, a large file is a link to a blob named by its sha256


class Mirror:
    """A checkpoint that lies in a folder, perhaps on another machine's disk."""

    def __init__(self, folder: Path, repository: str, revision: str) -> None:
        """Find the checkpoint. Raises FetchError if the folder holds none of this repository and revision."""
        self.folder = _find(typed(folder).absolute(), repository, revision)
        self.name = f"{repository} in {folder}"
        noted, self.hashes = self._note()
        self.revision = noted or revision or self.folder.name
        if revision and noted and noted != revision:
            raise FetchError(
                f"{self.folder} holds another revision of {repository}",
                f"it is {noted}",
                f"leave out --revision {revision}",
            )
        if not self.hashes:
            say(f"{self.folder} names no hashes ({NOTE}): the files' structure is checked, not their bytes")

    def files(self) -> list[Wanted]:
        """Return every file of the folder, with the sha256 that its note or its link's target names."""
        found = [path for path in sorted(self.folder.iterdir()) if path.is_file() and path.name != NOTE]
        return [Wanted(path.name, path.stat().st_size, self._digest(path)) for path in found]

    def bring(self, wanted: Wanted, part: Path, advance: Callable[[int], None]) -> None:
        """Copy what `part` lacks. Raises FetchError if the folder cannot be read."""
        try:
            with (self.folder / wanted.name).open("rb") as source, part.open("ab") as copy:
                source.seek(copy.tell())
                while data := source.read(CHUNK):
                    copy.write(data)
                    advance(len(data))
        except InterruptedError:
            raise
        except OSError as error:
            if error.filename is None:  # our own disk: full, most likely; the console's way names that
                raise
            raise FetchError(f"cannot copy {wanted.name}", str(error), f"ls -l {self.folder}") from error

    def _digest(self, path: Path) -> str:
        if path.name in self.hashes:
            return f"sha256:{self.hashes[path.name]}"
        target = path.resolve().name
        return f"sha256:{target}" if path.is_symlink() and BLOB.fullmatch(target) else ""

    def _note(self) -> tuple[str, dict[str, str]]:
        """Return the revision and the hashes that an earlier `model.fetch` wrote down; nothing if there is no note."""
        note = self.folder / NOTE
        if not note.exists():
            return "", {}
        try:
            told = json.loads(note.read_text(encoding="utf-8"))
            return str(told["revision"]), {name: str(entry["sha256"]) for name, entry in told["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FetchError(
                f"{note} cannot be read", repr(error), f"rm {note}   # its hashes are then not known"
            ) from error


def _find(folder: Path, repository: str, revision: str) -> Path:
    owner, _, name = repository.rpartition("/")
    cache = folder / f"models--{owner}--{name}" / "snapshots"
    snapshots = [path for path in cache.glob("*") if not revision or path.name == revision] if cache.is_dir() else []
    for place in (
        folder,
        folder / owner / name,
        folder / name,
        *sorted(snapshots, key=lambda path: path.stat().st_mtime)[-1:],
    ):
        if (place / "config.json").is_file():
            return place
    raise FetchError(
        f"{folder} holds no {repository}",
        f"there is no config.json in it, in {owner}/{name} or in models--{owner}--{name}/snapshots",
        f"ls {folder}",
    )
