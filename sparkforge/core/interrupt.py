"""SIGTERM and SIGHUP as exceptions, so that what is cleaned up after Ctrl-C is cleaned up after them as well.

Python's own handler raises KeyboardInterrupt between any two steps, also between the start of a program and the note
that it was started. `held` keeps such steps together.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TerminatedError(KeyboardInterrupt):
    """Someone asked this process to end, by the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _State:
    """The state of this process: the depth of `held`, a pending signal, and the signal that ends it."""

    depth = 0
    waiting: int | None = None
    ending: int | None = None


def _handle(number: int, _frame: FrameType | None) -> None:
    if number != signal.SIGINT and _State.ending is not None:
        return  # a second one must not cut the first one's cleaning up short; Ctrl-C and SIGKILL do
    if number != signal.SIGINT:
        _State.ending = number
    if _State.depth:
        _State.waiting = number
    else:
        raise KeyboardInterrupt if number == signal.SIGINT else TerminatedError(number)


@contextmanager
def caught() -> Iterator[None]:
    """While inside, SIGINT raises KeyboardInterrupt, and SIGTERM and SIGHUP raise TerminatedError, in the main thread.

    A signal that is ignored stays so (nohup). Outside the main thread this does nothing: Python handles signals there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in CAUGHT}
    for number, handler in former.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _handle)
    _State.ending = _State.waiting = None
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ending() -> int | None:
    """Return the signal that ends this process, also where someone has taken its exception; None if none came."""
    return _State.ending


@contextmanager
def held() -> Iterator[None]:
    """Keep the exceptions of signals back while inside; the last one is raised at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.depth += 1
    try:
        yield
    finally:
        _State.depth -= 1
        if not _State.depth and _State.waiting is not None:
            number, _State.waiting = _State.waiting, None
            raise KeyboardInterrupt if number == signal.SIGINT else TerminatedError(number)
