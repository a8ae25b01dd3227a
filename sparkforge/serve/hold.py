"""What a refused start does under a unit or a restart policy: it waits and validates again, instead of ending.

Who starts programs again (systemd, Docker) cannot tell that nothing has changed: a machine that is not fit to serve
would validate in a loop, for minutes each time. A held start asks again after 30 s, 1, 2, 4, … and at most 30 minutes,
and at once when the model's files, the driver or its devices change.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from sparkforge.core import notify, paths
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import RefusalError
from sparkforge.core.files import locked

LOCK, START = "hold.lock", "start a server"  # held while a start waits, so that `./inv down` finds it
FIRST, LONGEST = 30.0, 1800.0  # seconds before a refused start validates again: the first pause, and the longest
POLL = 2.0  # seconds between two looks at what may have changed
DRIVER, DEVICES = Path("/proc/driver/nvidia/version"), ("nvidia*", "dri/*")

P = ParamSpec("P")
T = TypeVar("T")


def pauses() -> Iterator[float]:
    """Yield the seconds to wait after each refusal."""
    seconds = FIRST
    while True:
        yield seconds
        seconds = min(2 * seconds, LONGEST)


def until_admitted(
    start: Callable[[], T],
    watched: Sequence[Path],
    tell: Callable[[str], None],
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> T:
    """Call `start` until no validator refuses, and return its value; `tell` gets what is waited for, in one line.

    `waiting` is entered while it waits. `watched` are the model's folder and other places whose change is a reason to
    validate at once.
    """
    for seconds in pauses():
        try:
            return start()
        except RefusalError as error:
            show_error(error)
            when = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
            reason = " ".join(error.why.split())
            tell(f"refused: {error.what}: {reason}; validates again at {when}, or when model, driver or devices change")
        with waiting():
            changed = wait(seconds, watched)
        if changed:
            say("something has changed; validating again")
    raise AssertionError("pauses never end")  # pragma: no cover


def wait(seconds: float, watched: Sequence[Path]) -> bool:
    """Wait; return early, with True, once one of the `watched` places, the driver or its devices has changed."""
    before, deadline = _look(watched), time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(POLL, remaining))
        if _look(watched) != before:
            return True
    return False


def held(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command with a parameter `hold`: with it a refusal is told to systemd and waited out, else raised."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        """Raises what the command raises, and StorageError if another start of this checkout waits."""
        if not kwargs.get("hold"):
            return command(*args, **kwargs)
        model = str(kwargs.get("model") or "")
        watched = [paths.typed(model)] if model else [paths.ROOT / "models"]
        return until_admitted(
            lambda: command(*args, **kwargs), watched, _tell, lambda: locked(paths.state() / LOCK, START)
        )

    return wrapped


def _tell(line: str) -> None:
    say(line)
    notify.tell(status=line)


def _look(places: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Return name, inode, size and time of the files of these places, the driver and its devices."""
    devices = [path for pattern in DEVICES for path in Path("/dev").glob(pattern)]
    files: list[tuple[str, int, int, int]] = []
    for path in (*places, DRIVER, *devices):
        with suppress(OSError):
            for file in (path, *(path.iterdir() if path.is_dir() else ())):
                status = file.stat()
                # The times of /proc and /dev are those of the look itself, or of every use.
                live = path == DRIVER or path in devices
                files.append((str(file), status.st_ino, status.st_size, 0 if live else status.st_mtime_ns))
    return sorted(files)
