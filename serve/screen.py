"""What the run side shows to a person."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serve import client, launch, logs, record
from serve.record import Server
from sparkforge import paths
from sparkforge.console import say
from sparkforge.docker_cli import program
from sparkforge.errors import NotRunningError, StartFailedError
from sparkforge.process import call

READY = """model: {model_id}   log: ./inv logs -f   stop: ./inv down

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'"""


def show_ready(server: Server) -> None:
    """Say where the model answers and how to ask it."""
    print(f"{server.url}/v1", flush=True)
    say(READY.format(url=server.url, model_id=server.model_id))


def stay(server: Server) -> None:
    """Show the log until the server ends or Ctrl-C, then see that it has stopped.

    Raises StartFailedError if the server ended by itself.
    """
    if server.container:
        _stay_by(server)
        return
    try:
        for text in logs.follow(Path(server.log), lambda: server.alive, from_end=True):
            _out(text)
    except KeyboardInterrupt:
        say(f"stopping {server.url}")
        launch.stop()
        return
    if record.read() == server:  # `./inv down` elsewhere forgets the record
        record.forget()
        raise StartFailedError(
            "the server ended by itself",
            "\n        ".join(logs.relevant(Path(server.log))),
            f"./inv doctor   # the whole log: less {server.log}",
        )


def _stay_by(server: Server) -> None:
    """Show a container's log until it ends or Ctrl-C, then see that it has stopped."""
    try:
        _container_log(server, follow=True)
    except KeyboardInterrupt:
        say(f"stopping {server.url}")
        launch.stop()


def show_status(server: Server) -> None:
    """Say what is served. Exit code 0 means that a process or container runs; its health is in the line."""
    health = "healthy" if client.healthy(server.url) else "not healthy"
    if server.container:
        from serve import docker_device  # noqa: PLC0415 - the Docker SDK takes half a second to load

        health += f", the container says {docker_device.health(server)}"
    print(f"{server.model_id} at {server.url}/v1 · {health} · {server.device} · {server.where}")


def show_log(*, follow: bool) -> None:
    """Print the last started server's log; with `follow` go on as it grows. Raises NotRunningError without a log."""
    server, log = record.read(), record.log_path()
    if server and server.container:
        _container_log(server, follow=follow)
        return
    if not log.exists():
        raise NotRunningError("there is no log", "this checkout started no server yet", "./inv up")
    for text in logs.follow(log, lambda: follow and server is not None and server.alive):
        _out(text)


def show_chat(server: Server, message: str, max_tokens: int) -> None:
    """Print the answer as it comes."""
    for piece in client.chat(server.url, server.model_id, message, max_tokens, server.key):
        _out(piece)
    _out("\n")


def shell(server: Server) -> int:
    """Open a shell where the server runs and return its exit code: in its container, or with its environment's PATH."""
    if server.container:
        return call([program(), "exec", "--interactive", "--tty", server.container, "bash"], cwd=paths.ROOT, env={})
    binaries = paths.state() / "envs" / server.device / "bin"
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return call([os.environ.get("SHELL") or "/bin/sh"], cwd=paths.ROOT, env={"PATH": path})


def _container_log(server: Server, *, follow: bool) -> None:
    """Hand a container's log through; the SDK would give up on a log that is silent for a while."""
    call([program(), "logs", *(["--follow"] if follow else []), server.container], cwd=paths.ROOT, env={})


def _out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
