"""Remove from the cache of fetched and patched files what no pin and no lock of this checkout names any more.

Such as the patched wheels of an earlier revision of a queue (0.4 GB each), or the archives of releases that
`lab.upstream` looked at. What another checkout still wants is fetched, or made, again by that checkout.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import confirmed, say
from sparkforge.core.errors import StorageError
from sparkforge.core.files import tree_size
from sparkforge.pins.locks import LOCKS, load
from sparkforge.sources import fetch

QUESTION = "Remove them? No other checkout of this user may be installing or building now."
SHA256 = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True)
class StoredFile:
    """The folder of the cache for one sha256, with the names of its files."""

    folder: Path
    names: tuple[str, ...]
    size: int  # bytes

    def __str__(self) -> str:
        return (
            f"{', '.join(self.names) or 'an empty folder'} ({self.size / 1e6:.1f} MB, sha256 {self.folder.name[:12]})"
        )


def named_hashes(files: Iterable[Path]) -> set[str]:
    """Return every sha256 that stands in these files: those of all pins and locks, whatever they are for."""
    return {digest for file in files for digest in SHA256.findall(file.read_text(encoding="utf-8"))}


def unnamed() -> list[StoredFile]:
    """Return what of the cache neither pins.toml nor a file under `locks/` names, the largest first."""
    sets = [lock.path for lock in load().sets.values() if lock.folder]
    named = named_hashes([paths.ROOT / "pins.toml", *sets, *(path for path in LOCKS.rglob("*") if path.is_file())])
    folders = [
        folder
        for folder in (paths.cache() / "files").glob("*/")
        if SHA256.fullmatch(folder.name) and not folder.is_symlink() and folder.name not in named
    ]
    files = [StoredFile(folder, _names(folder), tree_size(folder)) for folder in folders]
    return sorted(files, key=lambda file: (-file.size, file.names))


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(file.name for file in folder.iterdir() if file.name != fetch.VERIFIED))


def prune(*, dry_run: bool, yes: bool) -> None:
    """Remove what `unnamed` returns, and say what and how many bytes; with `dry_run` only say it.

    It asks first, unless `yes`: another checkout may be installing from these files. One that a process fetches or
    makes meanwhile is waited for. A run that is killed leaves nothing that is trusted. Raises UsageError where it
    cannot ask.
    """
    files = unnamed()
    for file in files if dry_run or not yes else ():
        say(f"would remove {file}")
    if files and not (dry_run or yes or confirmed(QUESTION, "--files asks first", "./inv clean-cache --files --yes")):
        say("nothing was removed")
        return
    for file in [] if dry_run else files:
        say(f"remove {file}")
        with fetch.locked_download(file.folder / "any"):
            shutil.rmtree(file.folder, ignore_errors=True)  # a second command like this one may have been faster
        if file.folder.exists():
            fix = f"look at its owner and permissions: ls -la {file.folder}"
            raise StorageError(f"{file.folder} is not removed", "a file in it stays", fix, code="storage.cache")
        shutil.rmtree(paths.cache() / "members" / file.folder.name, ignore_errors=True)  # read from that very file
    freed = sum(file.size for file in files)
    where = paths.cache() / "files"
    if not files:
        say(f"nothing to remove in {where}: a pin or a lock names all of it")
    elif dry_run:
        say(f"{len(files)} files in {where}, {freed / 1e6:.1f} MB (dry run: nothing was removed)")
    else:
        say(f"removed {len(files)} files, freed {freed / 1e6:.1f} MB")
