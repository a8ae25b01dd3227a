"""Defines a scenario: inputs, one command of Sparkforge, and invariants that hold whatever happens to the command.

The runner (`faults.py`) checks for every scenario that

- the command ends with success or with one of our errors, never with a traceback,
- every file whose name begins with `mine` is unchanged; these represent the user's own files,
- `judge` accepts the files after a broken run: no incomplete artifact counts as complete,
- the next run succeeds, and then the folder has exactly the files of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

MINE = "mine"  # how the names of the user's own files begin
TEMPORARY = "tmp"  # the folder for temporary files, which the system empties; a killed run may leave files there


def no_server(work: Path) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def nothing(work: Path) -> None:
    """Check nothing beyond the runner's checks."""


BUSY = 75  # exit code of a run in a race that ended with `storage.busy`, whose family's code has other causes too
LOCKS = ("*.lock",)  # a lock file contains the id of its last holder


@dataclass(frozen=True)
class Scenario:
    """One command on small data. `work` is an empty folder that `prepare` fills and that faults are injected below.

    `prepare` runs once and may change this process (variables, patched constants), from which every run is forked.
    `judge` and `healed` raise AssertionError. Files that match `volatile` differ from run to run. Files that match
    `kept` may remain, because a broken run puts them aside for the user. `races` are the allowed exit codes of
    concurrent runs: 0, and BUSY if that refusal is documented; empty if users cannot run the command concurrently.
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    judge: Callable[[Path], None] = nothing
    healed: Callable[[Path], None] = nothing
    serve: Callable[[Path], AbstractContextManager[None]] = no_server
    volatile: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    races: tuple[int, ...] = (0,)
    programs: bool = False  # whether disk operations also fail in programs that the command starts
    cost: float = 1.0  # relative duration of one run; expensive scenarios get fewer runs

    def snapshot(self, work: Path) -> dict[str, str]:
        """Return path → mode and sha256 of every file below `work`; for volatile files only the mode."""
        return dict(self._entries(work))

    def _entries(self, work: Path) -> Iterator[tuple[str, str]]:
        for top, folders, files in os.walk(work):
            if Path(top) == work and TEMPORARY in folders:
                folders.remove(TEMPORARY)
            for name in [*files, *(folder for folder in folders if Path(top, folder).is_symlink())]:
                path = Path(top, name)
                shown = str(path.relative_to(work))
                if any(fnmatchcase(shown, pattern) for pattern in self.kept):
                    continue
                if path.is_symlink():
                    yield shown, f"-> {path.readlink()}"
                    continue
                mode = f"{path.stat().st_mode & 0o777:o}"
                known = any(fnmatchcase(shown, pattern) for pattern in (*LOCKS, *self.volatile))
                yield shown, mode if known else f"{mode} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def mine(snapshot: dict[str, str]) -> dict[str, str]:
    return {path: value for path, value in snapshot.items() if path.rpartition("/")[2].startswith(MINE)}


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pinned_file(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
