"""Restarts of a container's server: the pause grows with each unrequested end, and then the container holds.

Docker restarts a failed container immediately, and with `unless-stopped` without end. A server that takes a Spark to
its limit at every start would then wedge it at every start. So the entrypoint keeps count, in SPARKFORGE_STATE, which
outlives the container and the machine's power: a start without an end counts as a failed one. Too many of them, and the
container stays up, unhealthy and without a server, until a person stops or restarts it (decision 0018).
"""

import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from sparkforge.core import paths
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import ServerError, StorageError
from sparkforge.core.files import read_json, write_json
from sparkforge.core.tables import Record
from sparkforge.serve import record
from sparkforge.serve.health import HELD_FILE

TOO_OFTEN = "the server ended too often and is not started"
NAME = "starts.json"
MAX_FAILURES = 3  # failures within WINDOW_SECONDS; then nothing is started any more
WINDOW_SECONDS = 3600.0
FIRST_SECONDS, FACTOR, LONGEST_SECONDS = 2.0, 4, 300.0  # 2, 8, 32 … from one end to the next start


class ServerFailure(Record):
    """An unrequested end: when, in Unix time, and why as far as it is known."""

    ended: float
    why: str


class Starts(Record):
    """The restart history of a container and command: failures, and the time of the last start (0: it ended)."""

    identity: tuple[str, ...]
    failures: tuple[ServerFailure, ...] = ()
    began: float = 0.0


def read(identity: Sequence[str], now: float) -> Starts:
    """Return this container's recorded starts without old failures; a start without a recorded end counts as failed."""
    try:
        known = Starts.model_validate(read_json(paths.state() / NAME))
    except (OSError, ValueError):
        known = Starts(identity=())
    if known.identity != tuple(identity):  # another container or another configuration: somebody changed something
        return Starts(identity=tuple(identity))
    failures = known.failures
    if known.began:
        why = "it was killed with its container, or the machine lost its power"
        end = record.last_end(known.began) or record.End(0, asked=False, time=now, why=why)
        why = end.why or f"it ended by itself with exit code {end.code}"
        failures = () if end.asked else (*failures, ServerFailure(ended=end.time, why=why))
    return Starts(identity=known.identity, failures=recent(failures, now))


def recent(failures: Sequence[ServerFailure], now: float) -> tuple[ServerFailure, ...]:
    """Return the failures that still count."""
    return tuple(failure for failure in failures if 0 <= now - failure.ended < WINDOW_SECONDS)


def summary(failures: Sequence[ServerFailure]) -> str:
    """Return how often the server failed, and why it failed last."""
    return f"{len(failures)} times within {WINDOW_SECONDS / 60:g} min; the last time {failures[-1].why}"


def pause_seconds(failures: Sequence[ServerFailure], now: float) -> float:
    """Return how long the next start waits after these failures."""
    if not failures:
        return 0.0
    pause = min(LONGEST_SECONDS, FIRST_SECONDS * FACTOR ** (len(failures) - 1))
    return max(0.0, float(failures[-1].ended + pause - now))


def admit(identity: Sequence[str], run: Path) -> None:
    """Wait as long as this start must; after too many failures hold the container until a person ends it."""
    starts = read(identity, time.time())
    _write(starts)
    if not starts.failures:
        return
    try:
        if len(starts.failures) >= MAX_FAILURES:
            restart_command = f"docker restart {name}" if (name := container_id()) else "docker compose restart vllm"
            fix = f"./inv doctor   # when the cause is gone: {restart_command}"
            hold(run, ServerError(TOO_OFTEN, summary(starts.failures), fix, code="server.restarts"))
        pause = pause_seconds(starts.failures, time.time())
        say(f"the last server failed ({starts.failures[-1].why}); the next one starts in {pause:.0f} s")
        time.sleep(pause)
    except SystemExit:  # a signal while it waits comes from a person, so the failures are forgotten
        with suppress(OSError):
            (paths.state() / NAME).unlink(missing_ok=True)
        raise


def hold(run: Path, error: ServerError) -> NoReturn:
    """Show why no server runs, tell it to the health check, and stay until a signal ends this process."""
    show_error(error)
    with suppress(OSError):
        (run / HELD_FILE).write_text(f"{error.what}: {error.why}", encoding="utf-8")
    while True:
        time.sleep(3600.0)


def container_id() -> str:
    """Return this container's id, which is its host name unless somebody chose one; empty then."""
    name = socket.gethostname()
    return name if re.fullmatch(r"[0-9a-f]{12}", name) else ""


def begin(identity: Sequence[str]) -> None:
    """Remember that a server starts now."""
    _write(read(identity, time.time()).model_copy(update={"began": time.time()}))


def _write(starts: Starts) -> None:
    with suppress(OSError, StorageError):  # without a lasting folder Docker's own count is all there is
        write_json(paths.state() / NAME, starts.model_dump(mode="json"))
