"""What a checkpoint is fetched from, and the note that a fetch leaves in the checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

NOTE = "sparkforge-model.json"  # our marker, written last: which revision this is, and every file's hash
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # a file that is not our JSON


@dataclass(frozen=True)
class RemoteFile:
    """One file: its name, its size in bytes, and its digest as `sha256:hex`, `git:hex` (a blob's id), or empty."""

    name: str
    size: int
    digest: str


class CheckpointSource(Protocol):
    """Where a checkpoint comes from. Every method raises a SparkforgeError for what goes wrong."""

    name: str
    repository: str
    revision: str

    def files(self) -> list[RemoteFile]:
        """Return every file that is there."""

    def fetch(self, file: RemoteFile, part: Path, advance: Callable[[int], None]) -> None:
        """Write the file's bytes to `part`, or only those that it lacks; `advance` takes the count of each piece."""


@dataclass(frozen=True)
class Note:
    """What an earlier fetch wrote into a checkpoint's folder: the marker that the folder is ours."""

    repository: str
    revision: str
    files: dict[str, str]  # name → sha256

    @classmethod
    def read(cls, folder: Path) -> Note | None:
        """Return the note in `folder`; None if there is none that can be read."""
        try:
            note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
            files = {str(name): str(entry["sha256"]) for name, entry in note["files"].items()}
            repository = note.get("repository") or note["source"].partition(" in ")[0]
            return cls(str(repository), str(note["revision"]), files)
        except UNREADABLE:
            return None
