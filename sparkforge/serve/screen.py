"""Output of the commands that run a server."""

from __future__ import annotations

import shlex
import time
from contextlib import closing
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import echo, echo_json, say, stream
from sparkforge.core.docker import program
from sparkforge.core.errors import ServerError
from sparkforge.core.process import output
from sparkforge.serve import launch, logs, record, status
from sparkforge.serve.record import Server

READY = """model: {model_id}   log: ./inv logs -f   stop: ./inv down

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
{key}  -d '{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'"""


def show_ready(server: Server) -> None:
    """Say where the model answers and how to ask it."""
    echo(f"{server.url}/v1")
    key = f'  -H "Authorization: Bearer $(cat {shlex.quote(server.key_file)})" \\\n' if server.key_file else ""
    say(READY.format(url=server.url, model_id=server.model_id, key=key))


def stay(server: Server) -> None:
    """Show the log until the server ends; at Ctrl-C stop the server.

    Returns if somebody asked it to end, as `./inv down` elsewhere does. Raises ServerError if it ended by itself.
    """
    log = Path(server.log)
    try:
        if server.container:
            _stay_with_container(server)
        else:
            stream(logs.follow(log, lambda: server.alive, from_end=True))
    except KeyboardInterrupt:
        say(f"stopping {server.url}")
        launch.stop()
        return
    end = record.ended(server)
    was_asked = record.read() != server or (end is not None and end.asked)  # `./inv down` elsewhere forgets the record
    if not server.container and not was_asked:
        record.forget()
        raise logs.failure("the server ended by itself", logs.read(log), server.log_command)


def _stay_with_container(server: Server) -> None:
    """Show a container's log until it has ended for good: Docker may start it again.

    Raises ServerError if its program failed.
    """
    from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

    while True:
        _container_log(server, follow=True)
        with engine.connected() as docker_client:
            state = engine.state(docker_client, server.container)
        ended = state is None or state.status in {"exited", "dead"}
        if state is None or (ended and state.exit_code in record.CLEAN_EXITS):
            return
        if ended:
            why = "the kernel killed it: its memory limit" if state.out_of_memory else "its log is above"
            fix = f"./inv doctor   # the whole log: docker logs {server.container[:12]}"
            raise ServerError(f"the container ended with code {state.exit_code}", why, fix, code="server.start")
        time.sleep(1)


def show_status(server: Server, *, as_json: bool = False) -> None:
    """Print the running server's state.

    Exit code 0 means that a process or container runs; its health is in the first line.
    """
    report = status.report(server)
    if as_json:
        echo_json(report.model_dump(mode="json"))
    else:
        echo("\n".join(status.lines(report)))


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


def _container_log(server: Server, *, follow: bool) -> None:
    """Print a container's log; the SDK would give up on a log that is silent for a while."""
    command = [program(), "logs", *(["--follow"] if follow else []), server.container]
    with closing(output(command, cwd=paths.ROOT)) as pieces:
        stream(pieces)
