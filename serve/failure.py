"""How the last `./inv up` failed, for `./inv doctor`: many failures leave no line in any log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge import paths
from sparkforge.errors import AlreadyRunningError, BusyError, SparkforgeError, UsageError
from sparkforge.files import write_json

NAME = "failure.json"
NO_TROUBLE = (AlreadyRunningError, BusyError, UsageError)  # the question was wrong, not the server


@dataclass(frozen=True)
class Failure:
    """An error of ours in its three parts, its class, and when that `./inv up` began and ended, in Unix time."""

    error: str
    what: str
    why: str
    fix: str
    began: float
    ended: float


@contextmanager
def remembered() -> Iterator[None]:
    """While inside, an error of ours is written down and raised again; an end without one forgets the last."""
    began = time.time()
    try:
        yield
    except NO_TROUBLE:
        raise
    except SparkforgeError as error:
        failure = Failure(type(error).__name__, error.what, error.why, error.fix, began, time.time())
        with suppress(OSError, SparkforgeError):  # a full disk may be the very error
            write_json(paths.state() / NAME, asdict(failure))
        raise
    with suppress(OSError):
        (paths.state() / NAME).unlink(missing_ok=True)


def read(state: Path) -> Failure | None:
    """Return the last failure under `state`; None if there was none or it cannot be read."""
    try:
        found = Failure(**json.loads((state / NAME).read_text(encoding="utf-8")))
        return found if isinstance(found.began, int | float) and isinstance(found.ended, int | float) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None
