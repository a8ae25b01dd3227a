"""What the run side shows to a person."""

from __future__ import annotations

import sys
from pathlib import Path

from serve import client, launch, logs, record
from serve.record import Server
from sparkforge.console import say
from sparkforge.errors import NotRunningError, StartFailedError

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
            "the server ended by itself", "\n        ".join(logs.relevant(Path(server.log))), f"less {server.log}"
        )


def show_status(server: Server) -> None:
    """Say what is served. Exit code 0 means that a process runs; its health is in the line."""
    health = "healthy" if client.healthy(server.url) else "not healthy"
    print(f"{server.model_id} at {server.url}/v1 · {health} · {server.device} · pid {server.pid}")


def show_log(*, follow: bool) -> None:
    """Print the last started server's log; with `follow` go on as it grows. Raises NotRunningError without a log."""
    server, log = record.read(), record.log_path()
    if not log.exists():
        raise NotRunningError("there is no log", "this checkout started no server yet", "./inv up")
    for text in logs.follow(log, lambda: follow and server is not None and server.alive):
        _out(text)


def show_chat(server: Server, message: str, max_tokens: int) -> None:
    """Print the answer as it comes."""
    for piece in client.chat(server.url, server.model_id, message, max_tokens):
        _out(piece)
    _out("\n")


def _out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
