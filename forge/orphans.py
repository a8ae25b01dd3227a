"""Compilers that outlive a killed build: they write the files that the next build reads, so it waits for them.

Each unit holds a lock, through its compilers, for as long as one of them lives, whatever becomes of us (flock(2)).
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from forge.jobs import Unit
from sparkforge.console import say

WAITING = "compilers of a killed build still work; waiting for them to end"


@contextmanager
def ended(lock: Path) -> Iterator[None]:
    """Wait until nobody holds `lock`, and go on."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(WAITING)
            fcntl.flock(file, fcntl.LOCK_EX)
    yield


def holding(lock: Path, unit: Unit) -> Unit:
    """Return `unit` as a command that holds `lock` while it, or what it started, lives (flock is in util-linux)."""
    return replace(unit, command=("flock", "--shared", "--no-fork", str(lock), *unit.command))
