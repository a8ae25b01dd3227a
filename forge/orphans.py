"""Compilers that outlive a killed build: they write the files that the next build reads, so it waits for them.

Each unit holds a lock, through its compilers, for as long as one of them lives, whatever becomes of us (flock(2)).
"""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path

from forge.jobs import Unit
from sparkforge.console import say

WAITING = "compilers of a killed build still work; waiting for them to end"


def wait(lock: Path) -> None:
    """Wait until nobody holds `lock`.

    To be done before ninja is asked anything: even `ninja -n` removes depfiles (seen with 1.13), and ccache stores
    nothing for a compiler whose depfile is gone when it ends.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(WAITING)
            fcntl.flock(file, fcntl.LOCK_EX)


def holding(lock: Path, unit: Unit) -> Unit:
    """Return `unit` as a command that holds `lock` while it, or what it started, lives (flock is in util-linux)."""
    return replace(unit, command=("flock", "--shared", "--no-fork", str(lock), *unit.command))
