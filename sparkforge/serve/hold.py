"""Wait after a refused start under a systemd unit or a restart policy, and validate again instead of ending.

A supervisor such as systemd or Docker does not know whether anything has changed: a machine that is not fit to serve
would validate in a loop, for minutes each time. A held start validates again after 30 s, 1, 2, 4, … and at most 30
minutes.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

from sparkforge.core import paths
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import RefusalError
from sparkforge.core.files import locked

LOCK, START = "hold.lock", "start a server"  # held while a start waits, so that `./inv down` finds it
SOCKET = "NOTIFY_SOCKET"  # where systemd listens
FIRST, LONGEST = 30.0, 1800.0  # seconds before a refused start validates again: the first pause, and the longest

T = TypeVar("T")


def until_admitted(
    start: Callable[[], T],
    tell: Callable[[str], None],
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> T:
    """Call `start` until no validator refuses; `tell` gets a line about each pause, spent in the context `waiting`."""
    seconds = FIRST
    while True:
        try:
            return start()
        except RefusalError as error:
            show_error(error)
            when = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
            reason = " ".join(error.why.split())
            tell(f"refused: {error.what}: {reason}; validates again at {when}")
        with waiting():
            time.sleep(seconds)
        seconds = min(2 * seconds, LONGEST)


def hold_start(start: Callable[[], T]) -> T:
    """Call `start` until no validator refuses; tell systemd of pauses. Raises StorageError if another start waits."""

    def wait(line: str) -> None:
        say(line)
        tell_systemd(status=line)

    return until_admitted(start, wait, partial(locked, paths.state() / LOCK, START))


def tell_systemd(*, ready: bool = False, status: str = "") -> None:
    """Send READY=1 and a status line to the service manager that started this process, if any (sd_notify(3))."""
    address = os.environ.get(SOCKET, "")
    if not address:
        return
    lines = (["READY=1"] if ready else []) + ([f"STATUS={' '.join(status.split())}"] if status else [])
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        # A leading @ means the abstract namespace, whose addresses begin with NUL.
        channel.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        channel.sendall("\n".join(lines).encode(errors="replace"))
