"""Defines a scenario: inputs, one command of Sparkforge, and invariants that hold whatever happens to the command.

The runner (`faults.py`) checks for every scenario that

- the command ends with success or with one of our errors, never with a traceback,
- every file whose name begins with `mine` is unchanged; these represent the user's own files,
- `judge` accepts the files after a broken run: no incomplete artifact counts as complete,
- the next run succeeds, and then the folder has exactly the files of an undisturbed run.
"""

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from sparkforge.pins import Pins
from sparkforge.sources import fetch

MINE = "mine"  # how the names of the user's own files begin
TEMPORARY = "tmp/"  # the folder for temporary files, which the system empties; a killed run may leave files there


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
    judge: Callable[[Path], None] = lambda work: None
    healed: Callable[[Path], None] = lambda work: None
    serve: Callable[[Path], AbstractContextManager[None]] = contextlib.nullcontext
    volatile: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    races: tuple[int, ...] = (0,)
    programs: bool = False  # whether disk operations also fail in programs that the command starts
    cost: float = 1.0  # relative duration of one run; expensive scenarios get fewer runs

    def snapshot(self, work):
        """Return path → mode and sha256 of every file below `work`; for volatile files only the mode."""
        return dict(self._entries(work))

    def _entries(self, work):
        for path in work.rglob("*"):
            shown = str(path.relative_to(work))
            if shown.startswith(TEMPORARY) or any(fnmatchcase(shown, pattern) for pattern in self.kept):
                continue
            if path.is_symlink():
                yield shown, f"-> {path.readlink()}"
            elif path.is_file():
                mode = f"{path.stat().st_mode & 0o777:o}"
                known = any(fnmatchcase(shown, pattern) for pattern in (*LOCKS, *self.volatile))
                yield shown, mode if known else f"{mode} {sha256(path.read_bytes())}"


def mine(snapshot):
    return {path: value for path, value in snapshot.items() if path.rpartition("/")[2].startswith(MINE)}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def cached(name, data):
    """Write a file of a pin into the cache; return its hash."""
    write(fetch.cached(name, sha256(data)), data)
    return sha256(data)


def component(package, name, data, kind="wheel", **more):
    """Return the pin of a package in a version 1 with one file."""
    files = {name: {"sha256": sha256(data), "size": len(data)}}
    return {"version": "1", "kind": kind, "package": package, "licence": "MIT", "why": "test", "files": files, **more}


def table(components, **more):
    """Return pins with one stack `s`."""
    stacks = {"s": {"summary": "a stack", "components": components}}
    return Pins.model_validate({"schema": 1, "default": "s", "stacks": stacks, **more})


@contextmanager
def serving(server):
    """Run the context manager `server` in a child and yield its URL: the runner forks and must not have threads."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide the server's errors about killed clients
        with server() as running:
            os.write(write_end, running.url.encode())
            signal.pause()
        os._exit(0)
    try:
        yield os.read(read_end, 200).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)
