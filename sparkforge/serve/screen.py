"""What the commands that run a server print."""

from __future__ import annotations

import os
import shlex
import time
from contextlib import closing
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import echo, say, stream
from sparkforge.core.docker import program
from sparkforge.core.errors import ServerError
from sparkforge.core.process import call, output
from sparkforge.serve import client, launch, logs, proof, record
from sparkforge.serve.record import Server

READY = """model: {model_id}   log: ./inv logs -f   stop: ./inv down

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
{key}  -d '{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'"""


def show_ready(server: Server) -> None:
    """Say where the model answers and how to ask it."""
    echo(f"{server.url}/v1")
    key = f'  -H "Authorization: Bearer $(cat {shlex.quote(server.key_file)})" \\\n' if server.key_file else ""
    say(READY.format(url=server.url, model_id=server.model_id, key=key))


def show_stopped(server: Server | None) -> None:
    """Say what was stopped; None means processes of a server that nobody recorded."""
    say(f"stopped {server.url}" if server else "stopped what a killed ./inv up had left")


def stay(server: Server) -> None:
    """Show the log until the server ends; at Ctrl-C stop the server.

    Raises ServerError if a server that is no container ended by itself.
    """
    log = Path(server.log)
    try:
        if server.container:
            _container_log(server, follow=True)
        else:
            stream(logs.follow(log, lambda: server.alive, from_end=True))
    except KeyboardInterrupt:
        say(f"stopping {server.url}")
        launch.stop()
        return
    if not server.container and record.read() == server:  # `./inv down` elsewhere forgets the record
        record.forget()
        why, fix = "\n        ".join(logs.explain(logs.read(log))), f"./inv doctor   # the whole log: less {log}"
        raise ServerError("the server ended by itself", why, fix, code="server.start")


def show_status(server: Server) -> None:
    """Say what is served. Exit code 0 means that a process or container runs; its health is in the line."""
    health = "healthy" if client.healthy(server.url) else "not healthy"
    if server.container:
        from sparkforge.serve import container as docker_device  # noqa: PLC0415 - the Docker SDK takes half a second to load

        health += f", the container says {docker_device.health(server)}"
    if server.key_file:
        health += " · API key required"
        if not client.accepts(server.url, server.key):
            health += f", and it is no longer the one in {server.key_file}: ./inv down, then ./inv up"
    echo(f"{server.model_id} at {server.url}/v1 · {health} · {server.device} · {server.where}")
    if server.proved:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(server.proved))
        echo(f"{proof.in_words(server.proof)} · at its start, {when}")
    else:
        echo("proved nothing: its start has not ended")


def show_log(*, follow: bool) -> None:
    """Print the last started server's log; with `follow` go on as it grows. Raises ServerError without a log."""
    server, log = record.read(), record.log_path()
    if server and server.container:
        _container_log(server, follow=follow)
        return
    if not log.exists():
        why = "this checkout started no server yet"
        raise ServerError("there is no log", why, "./inv up", code="server.not-running")
    stream(logs.follow(log, lambda: follow and server is not None and server.alive))


def show_chat(server: Server, message: str, max_tokens: int) -> None:
    """Print the answer as it comes."""
    stream(client.chat(server.url, server.model_id, message, max_tokens, server.key))
    echo()


def shell(server: Server) -> int:
    """Open a shell where the server runs and return its exit code: in its container, or with its environment's PATH."""
    if server.container:
        return call([program(), "exec", "--interactive", "--tty", server.container, "bash"], cwd=paths.ROOT, env={})
    binaries = paths.state() / "envs" / server.device / "bin"
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return call([os.environ.get("SHELL") or "/bin/sh"], cwd=paths.ROOT, env={"PATH": path})


def _container_log(server: Server, *, follow: bool) -> None:
    """Print a container's log; the SDK would give up on a log that is silent for a while."""
    command = [program(), "logs", *(["--follow"] if follow else []), server.container]
    with closing(output(command, cwd=paths.ROOT)) as pieces:
        stream(pieces)
