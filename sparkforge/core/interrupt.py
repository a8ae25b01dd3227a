"""Turn SIGTERM and SIGHUP into exceptions, so that they cause the same cleanup as Ctrl-C.

Python's own handler raises KeyboardInterrupt between any two steps, also between the start of a program and the record
of that start. `held` delays signals during such steps.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TerminatedError(KeyboardInterrupt):
    """The signal `number` asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _State:
    """The state of this process: the nesting depth of `held`, a pending signal, and the signal that ends it."""

    depth = 0
    waiting: int | None = None
    ending: int | None = None


def _handle(number: int, _frame: FrameType | None) -> None:
    if number != signal.SIGINT and _State.ending is not None:
        return  # a second signal must not cut short the cleanup of the first; Ctrl-C and SIGKILL may
    if number != signal.SIGINT:
        _State.ending = number
    if _State.depth:
        _State.waiting = number
    else:
        raise KeyboardInterrupt if number == signal.SIGINT else TerminatedError(number)


@contextmanager
def caught() -> Iterator[None]:
    """While inside, SIGINT raises KeyboardInterrupt, and SIGTERM and SIGHUP raise TerminatedError, in the main thread.

    An ignored signal stays ignored (nohup). Other threads do nothing: Python handles signals in the main thread.
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
    """Return the signal that ends this process, even if its exception was caught; None without such a signal."""
    return _State.ending


@contextmanager
def held() -> Iterator[None]:
    """Delay the exceptions of signals while inside; the last one is raised at the end."""
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
