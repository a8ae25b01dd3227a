"""What a scenario is: inputs, one command of Sparkforge, and what must hold whatever happens to the command.

The runner (`faults.py`) checks for every scenario that

- the command ends with success or with one of our errors, never with a traceback,
- every file whose name begins with `mine` is as it was: those stand for the user's own,
- `judge` finds nothing wrong with what a broken run left: no artifact that is accepted and not whole,
- the next run succeeds, and then the folder holds exactly the files of a run that nothing disturbed.
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
TEMPORARY = "tmp"  # the folder for temporary files, which the system empties: what a killed run leaves there may stay


def no_server(work: Path) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def nothing(work: Path) -> None:
    """Check nothing more than the runner does."""


BUSY = 75  # exit code of a run in a race that ended with `storage.busy`; the family's own code has other cases too
LOCKS = ("*.lock",)  # a lock names the process that held it last


@dataclass(frozen=True)
class Scenario:
    """One command on small data. `work` is an empty folder that `prepare` fills and that faults are injected below.

    `prepare` runs once and may change this process (variables, patched constants): every run is forked from it.
    `judge` and `healed` raise AssertionError. Files that match `volatile` differ from run to run. Those that match
    `kept` may stay: a broken run has put them aside for the user. `races` are the exit codes that a run may have while
    others run beside it: 0, and BUSY where that refusal is documented; none where no user can run it beside itself.
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
    programs: bool = False  # whether the disk fails for the programs that the command starts, too
    cost: float = 1.0  # how long one run takes, compared with the others: expensive ones get fewer

    def snapshot(self, work: Path) -> dict[str, str]:
        """Return path → mode and sha256 of every file below `work`; of a volatile one its mode alone."""
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
