"""What a checkpoint is fetched from, and the note that a fetch leaves in the checkpoint's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import AliasChoices, Field, ValidationError

from sparkforge.core.documents import DocumentError, read_json
from sparkforge.core.errors import InputError
from sparkforge.core.tables import Record

NOTE = "sparkforge-model.json"  # our marker, written last: which revision this is, and every file's hash


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


class NotedFile(Record, extra="ignore"):
    """A file of a note."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Note(Record, extra="ignore"):
    """What an earlier fetch wrote into a checkpoint's folder: the marker that the folder is ours."""

    repository: str = Field(validation_alias=AliasChoices("repository", "source"))  # older notes have only the latter
    revision: str
    files: dict[str, NotedFile]

    @classmethod
    def read(cls, folder: Path) -> Note | None:
        """Return the note in `folder`; None if there is none. Raises InputError for one that cannot be read."""
        path = folder / NOTE
        try:
            return cls.model_validate(read_json(path))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"[:300]
        except (OSError, DocumentError) as error:
            why = str(error)
        fix = f"rm {path}   # its hashes are then not known"
        raise InputError(f"{path} cannot be read", why, fix, code="input.model")
