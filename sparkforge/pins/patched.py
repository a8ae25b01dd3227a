"""`locks/patched.toml`: the patched wheel or source archive of each upstream file, by hash."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, RootModel

from sparkforge.core.paths import ROOT
from sparkforge.core.tables import Record, load
from sparkforge.pins.table import Sha256, Text

PATH = ROOT / "locks" / "patched.toml"  # not locks.LOCKS: the validator reads it where `pins.locks` is not installed


class PatchedFile(Record):
    """The patched form of an upstream file: its queue (folder under patches/), and the resulting file."""

    queue: Text
    queue_sha256: Sha256
    revision: int = Field(gt=0, strict=True)  # N of the version's +sparkforge.N
    file: Text
    sha256: Sha256
    size: int = Field(gt=0, strict=True)  # bytes
    record: Sha256 | None = None  # for a wheel: `record_digest` of its RECORD (core/installed.py)


class PatchedLock(RootModel[dict[str, PatchedFile]]):
    """Every patched file by upstream's file name."""


def load_patched(path: Path | None = None) -> Mapping[str, PatchedFile]:
    """Read the lock, by default PATH; empty if there is no file. Raises InputError."""
    path = path or PATH
    return load(path, PatchedLock).root if path.exists() else {}
