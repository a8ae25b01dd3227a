"""The failure of the last `./inv up`, for `./inv doctor`: many failures leave no line in any log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.advice import completed
from sparkforge.core.documents import read_json
from sparkforge.core.errors import SparkforgeError
from sparkforge.core.files import write_atomic
from sparkforge.core.urls import without_passwords

NAME = "failure.json"
# The command was wrong, not the server: an argument, a model or a stack that is not there, a second start.
NOT_FAILURES = {"usage", "input.model", "input.pins", "server.running", "storage.busy"}


@dataclass(frozen=True)
class Failure:
    """An error of ours: its code, its three parts, and when that `./inv up` began and ended, in Unix time."""

    error: str
    what: str
    why: str
    fix: str
    began: float
    ended: float


@contextmanager
def remembered() -> Iterator[None]:
    """Write down an error of ours that is raised inside, and raise it again; an end without one forgets the last."""
    began = time.time()
    try:
        yield
    except SparkforgeError as error:
        if error.code not in NOT_FAILURES:
            failed, why, fix = (
                without_passwords(part) for part in (error.what, error.why, completed(error.fix, "./inv up"))
            )
            failure = Failure(error.code, failed, why, fix, began, time.time())
            with suppress(OSError, SparkforgeError):  # a full disk may be the very error
                write_atomic(paths.state() / NAME, json.dumps(asdict(failure)) + "\n", mode=0o600)
        raise
    with suppress(OSError):
        (paths.state() / NAME).unlink(missing_ok=True)


def read(state: Path) -> Failure | None:
    """Return the last failure under `state`; None if there was none or it cannot be read."""
    try:
        failure = Failure(**read_json(state / NAME))
        return failure if isinstance(failure.began, int | float) and isinstance(failure.ended, int | float) else None
    except (OSError, ValueError, TypeError):
        return None
