"""The one exit point of every task: an error of ours becomes three lines and its exit code, never a traceback."""

from __future__ import annotations

import errno
import functools
import os
import shlex
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from invoke.exceptions import Exit
from invoke.tasks import task

from sparkforge import interrupt, paths
from sparkforge.console import say, show_error
from sparkforge.errors import SparkforgeError, StorageError, UsageError
from sparkforge.files import disk_full

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")
SIGNALLED = 128  # plus the signal's number, as shells have it: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a task's body so that it ends with the exit code of the error it raises, or of the signal that ended it."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        """Raises Invoke's Exit, which prints nothing, for everything but a fault of ours."""
        try:
            with interrupt.caught():
                result = function(*args, **kwargs)
        except SparkforgeError as error:
            show_error(error)
            raise Exit(code=error.exit_code) from None
        except BrokenPipeError:  # `./inv logs | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise Exit(code=0) from None
        except OSError as error:
            told = _storage(error)
            if told is None:
                raise
            show_error(told)
            raise Exit(code=told.exit_code) from None
        except KeyboardInterrupt as error:
            number = getattr(error, "number", signal.SIGINT)
            say(f"ended by {signal.Signals(number).name}; the same command goes on where it can")
            raise Exit(code=SIGNALLED + number) from None
        if number := interrupt.ending():  # taken by who shows a log or stays with a server
            raise Exit(code=SIGNALLED + number)
        return result

    return wrapped


def verb(**flags: str) -> Callable[[Callable[..., None]], Any]:
    """Make an Invoke task of a function; `flags` are the help texts of its parameters."""

    def decorate(function: Callable[..., None]) -> Any:
        """`json_` is the flag --json: a parameter may not be called as what it would hide."""
        return task(help={name.strip("_").replace("_", "-"): text for name, text in flags.items()})(command(function))

    return decorate


def whole_number(flag: str, text: str) -> int:
    """Return `text` as an int. Raises UsageError; Invoke's own conversion would end in a traceback."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{flag} {text!r} is no number", "it takes a whole number", "./inv --help") from None


def listed(text: str) -> list[str]:
    """Return the words between commas, none of them empty."""
    return [word for part in text.split(",") if (word := part.strip())]


def arguments(flag: str, text: str) -> list[str]:
    """Return `text` cut as a shell would cut it. Raises UsageError for a quotation that does not end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r} cannot be read", str(error), f"{flag} 'WORD WORD'") from None


def named(flag: str, word: str, known: Mapping[str, V]) -> V:
    """Return what `word` names among `known`. Raises UsageError."""
    if word not in known:
        raise UsageError(
            f"{flag} {word!r} is not known", f"there are {', '.join(known)}", f"{flag} {next(iter(known))}"
        )
    return known[word]


def _storage(error: OSError) -> SparkforgeError | None:
    """Name what a file system refused; None for an error about no file: a fault of ours, whose traceback helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(_existing(Path(error.filename or paths.state())))
    if not error.filename:
        return None
    path = Path(os.fsdecode(error.filename))
    fix = f"look at its owner and permissions: ls -ld {_existing(path)}, or name others by SPARKFORGE_STATE and _CACHE"
    return StorageError(f"cannot use {path}", error.strerror or str(error), fix)


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())
