"""Start a server and stop it: one at a time for a checkout, detached, its log in a file, nothing left behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from serve import client, logs, record
from serve.record import Server
from sparkforge import interrupt, paths
from sparkforge.errors import AlreadyRunningError, PortTakenError, ServerReplyError, StartFailedError, UsageError
from sparkforge.files import locked
from sparkforge.process import spawn, started_at, terminate_session

LOOPBACK = "127.0.0.1"
READY_SECONDS = 900.0  # a slow disk and two cores; a broken start ends by itself long before


@dataclass(frozen=True)
class Launch:
    """What to start: a command with the environment added to ours, and where it will listen."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    model: Path
    model_id: str
    device: str
    port: int
    host: str = LOOPBACK
    timeout: float = field(default=READY_SECONDS)


def check_free(port: int, host: str = LOOPBACK) -> None:
    """Raise AlreadyRunningError if our server runs, PortTakenError if another program holds the port."""
    server = record.read()
    if server and server.alive:
        raise AlreadyRunningError(
            "a server of this checkout runs already",
            f"{server.model_id} at {server.url}",
            "./inv down, then ./inv up",
        )
    if not 0 < port < 65536:
        raise UsageError(f"{port} is no port", "ports are 1 to 65535", "./inv up --port 8000")
    with socket.socket() as probe:
        # As uvicorn binds: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise PortTakenError(f"cannot use port {port}", str(error), "./inv up --port 8000") from error
        except OSError as error:
            raise PortTakenError(
                f"port {port} is taken",
                f"another program listens on {host}:{port}",
                f"./inv up --port {port + 1}",
            ) from error


def start(launch: Launch, progress: Callable[[str], None]) -> Server:
    """Start a server and wait for its first token.

    Raises AlreadyRunningError, PortTakenError or StartFailedError; whenever it raises, nothing is left running.
    """
    with locked(paths.state() / "serve.lock", "start a server"), ExitStack() as stack:
        check_free(launch.port, launch.host)
        with interrupt.held():  # none may run that we do not know of
            server = _spawn(launch)
            stack.push(lambda kind, *_: _end(server) if kind else None)  # also Ctrl-C: nobody waits for it then
        _wait(server, launch, progress)
    return server


def stop() -> Server:
    """End the running server with all its children and return its record. Raises NotRunningError."""
    recorded = record.read()
    if recorded and recorded.container:  # one that has ended is still there, and goes too
        from serve import docker_device  # noqa: PLC0415 - the Docker SDK takes half a second to load

        docker_device.stop(recorded)
        return recorded
    server = record.running()
    _end(server)
    return server


def _end(server: Server) -> None:
    terminate_session(server.pid)
    record.forget()


def _spawn(launch: Launch) -> Server:
    log = record.log_path()
    if log.exists():
        log.replace(log.with_name("server.previous.log"))
    pid = spawn(launch.command, log=log, env={**os.environ, **launch.environment}, cwd=paths.state())
    server = Server(
        pid=pid,
        started=started_at(pid) or 0.0,
        host=launch.host,
        port=launch.port,
        model=str(launch.model),
        model_id=launch.model_id,
        device=launch.device,
        log=str(log),
    )
    try:
        record.write(server)
    except BaseException:  # such as a full disk: nobody would find it
        terminate_session(pid)
        raise
    return server


def _wait(server: Server, launch: Launch, progress: Callable[[str], None]) -> None:
    def alive() -> bool:
        """Asked again and again while we wait, so it also tells how far the log has come."""
        progress(logs.milestone(Path(server.log)) or "starting")
        return server.alive

    try:
        served = client.wait_until_serving(server.url, server.model_id, time.monotonic() + launch.timeout, alive)
        how = "did not answer in time" if server.alive else "ended before it served"
    except ServerReplyError as error:
        served, how = False, f"is healthy but cannot generate ({error.why})"
    if not served:
        lines = "\n        ".join(logs.relevant(Path(server.log)) or ["its log is empty"])
        raise StartFailedError(f"the server {how}", lines, f"./inv doctor   # the whole log: less {server.log}")
