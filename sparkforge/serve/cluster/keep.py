"""`python -P -m sparkforge.serve.cluster.keep CONFIG`: starts a cluster again, in order, when a node's part has ended.

`cluster.up` starts this keeper on the machine that the commands run on, in a session of its own. It polls the head,
whose part ends whenever another node's does. After an unrequested end it pauses as one machine's server does
(restarts.py), waits until every node answers, ends what is left, and starts as `cluster.up` does: check, validation,
workers, head. After too many failures it gives up.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from sparkforge.core import interrupt, paths
from sparkforge.core.console import say, show_error
from sparkforge.core.errors import ServerError, SparkforgeError
from sparkforge.core.files import holder, locked, read_json, write_json
from sparkforge.core.process import spawn, started_at
from sparkforge.serve import restarts
from sparkforge.serve.cluster import start
from sparkforge.serve.cluster.config import ClusterConfig
from sparkforge.serve.restarts import ServerFailure

PURPOSE = "start a cluster again"
LOCK, NOTE, LOG = "cluster.lock", "cluster.keep.json", "logs/cluster.log"  # in SPARKFORGE_STATE
LOOK_SECONDS = 5.0  # each query starts an interpreter on the node
BEGIN_SECONDS = 30.0
RETURN_SECONDS = 1800.0  # for a machine's restart, with a check of its disks
END_SECONDS = 200.0  # more than the keeper's own `down` takes


def running() -> int | None:
    """Return the process id of the running keeper; None if none runs for this checkout."""
    return holder(paths.state() / LOCK, PURPOSE)


def state() -> dict[str, Any]:
    """Return the keeper's `state`, the reason (`why`), and the number of `failures` that it remembers."""
    note: dict[str, Any] = {"state": "off", "why": "nothing starts a part again", "failures": 0}
    with suppress(OSError, ValueError):
        read = read_json(paths.state() / NOTE)
        if isinstance(read, dict) and note.keys() <= read.keys() and (running() or read["state"] == "gave up"):
            note = {name: read[name] for name in note}
    return note


def refuse_second() -> None:
    """Raise ServerError if a keeper runs: it may be about to start the nodes."""
    if pid := running():
        why = f"pid {pid} serves it, or is about to start it again: {state()['why']}"
        failure = "this checkout already keeps a cluster running"
        raise ServerError(failure, why, "./inv cluster.down", code="server.running")
    (paths.state() / NOTE).unlink(missing_ok=True)  # of a keeper that gave up


def begin(config: ClusterConfig) -> int:
    """Start a keeper, and return its process id once it holds its lock. Raises ServerError."""
    command = [sys.executable, "-m", __name__, config.model_dump_json(by_alias=True)]
    pid = spawn(command, log=paths.state() / LOG, env=os.environ, cwd=paths.ROOT)
    started, deadline = started_at(pid), time.monotonic() + BEGIN_SECONDS
    while running() != pid:
        if started_at(pid) != started or time.monotonic() > deadline:
            why = "the nodes serve; a part that ends is not started again"
            raise ServerError("the keeper did not start", why, f"less {paths.state() / LOG}", code="server.cluster")
        time.sleep(0.05)
    return pid


def end() -> None:
    """End the keeper and any start of the cluster that it is running. Raises ServerError if it does not end."""
    (paths.state() / NOTE).unlink(missing_ok=True)
    if not (pid := running()):
        return
    started, deadline = started_at(pid), time.monotonic() + END_SECONDS
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)  # its ssh processes too
    while started_at(pid) == started:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            fix = f"kill -9 {pid}; ./inv cluster.down"
            raise ServerError("the keeper does not end", f"pid {pid} was asked to", fix, code="server.cluster")
        time.sleep(0.05)
    (paths.state() / NOTE).unlink(missing_ok=True)


def keep(config: ClusterConfig) -> None:
    """Start the cluster again after each unrequested end. Raises ServerError after too many failures."""
    failures: tuple[ServerFailure, ...] = ()
    _note("watching", config.head.name, failures)
    while why := _next_end(config):
        while why:
            now = time.time()
            failures = restarts.recent((*failures, ServerFailure(ended=now, why=why)), now)
            if len(failures) >= restarts.MAX_FAILURES:
                why, fix = restarts.summary(failures), "./inv cluster.logs   # when the cause is gone: ./inv cluster.up"
                raise ServerError("the cluster ended too often and is not started", why, fix, code="server.restarts")
            why = _start_again(config, failures)
        _note("watching", f"started again after: {failures[-1].why}", failures)


def _next_end(config: ClusterConfig) -> str:
    """Wait until the head's part has ended, and return why; empty if that was requested."""
    while True:
        with suppress(SparkforgeError):  # a head that does not answer may still serve
            answer = start.ask(config, config.head, "status")
            if answer["state"] == "stopped" or answer.get("asked"):
                return ""
            if answer["state"] == "ended":
                return str(answer["why"])
        time.sleep(LOOK_SECONDS)


def _start_again(config: ClusterConfig, failures: tuple[ServerFailure, ...]) -> str:
    """Pause, wait until every node answers, and start; return why that failed, or ""."""
    pause = restarts.pause_seconds(failures, time.time())
    _note("pausing", f"{failures[-1].why}; the next start is in {pause:.0f} s", failures)
    time.sleep(pause)
    deadline = time.monotonic() + RETURN_SECONDS
    try:
        while silent := [name for name, node in start.status(config).items() if node["state"] == "silent"]:
            why = f"{', '.join(silent)} does not answer"  # a node that restarts is no failure
            _note("waiting", why, failures)
            if time.monotonic() > deadline:
                why = f"{why} for {RETURN_SECONDS:g} s"
                raise ServerError("the cluster has too few nodes", why, "./inv cluster.check", code="server.cluster")
            time.sleep(LOOK_SECONDS)
        _note("starting", failures[-1].why, failures)
        start.down(config)
        start.up(config)
    except SparkforgeError as error:
        show_error(error)
        return f"{error.what}: {error.why}"
    return ""


def _note(doing: str, why: str, failures: tuple[ServerFailure, ...]) -> None:
    say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {doing}: {why}")
    with suppress(OSError):  # such as a full disk: it keeps the cluster all the same
        write_json(paths.state() / NOTE, {"state": doing, "why": why, "failures": len(failures)})


def main(argument: str) -> int:
    """Keep the cluster of this configuration; return the exit code."""
    config = ClusterConfig.model_validate_json(argument)
    try:
        with interrupt.caught(), locked(paths.state() / LOCK, PURPOSE):
            keep(config)
    except KeyboardInterrupt:
        return 0
    except ServerError as error:
        show_error(error)
        if error.code == "server.restarts":
            _note("gave up", error.why, ())
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
