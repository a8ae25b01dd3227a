"""`python -P watch.py OPTIONS -- COMMAND`: run a node's part of a server, and end it when another node's part ends.

vLLM watches the workers of its own machine only. Without this program, a head that has lost a worker keeps its port
open but answers no request, and a worker that has lost its head waits for ever. Each worker holds a connection to the
head on the control network; both ends send a line a second. If a node's connection breaks, its lines stop, or it
reports that its server has ended, all other nodes end their parts, and write the node's name into their logs.

It runs as a file below the supervisor (sparkforge/serve/supervise.py) and imports only the standard library.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # ten lost lines mean that the cable, the machine or its kernel has failed
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL, because vLLM waits for answers that cannot be computed any more
TURN_SECONDS = 0.2
LONGEST_LINE = 4096  # bytes; our own lines are shorter
ENDED = 24  # sparkforge.core.errors.ServerError's code
TOKEN = "SPARKFORGE_CLUSTER_TOKEN"  # noqa: S105 - a variable's name
MEMORY = "its memory guard ended it"  # serve/supervise.py sends SIGURG first, which other programs ignore
ORPHANED = "its supervisor was killed"  # the kernel then sends SIGTERM, by PR_SET_PDEATHSIG in serve/supervise.py
STOPPED = "it was stopped"  # by a signal: on request, or because the machine shuts down in order
# Read by people, by `./inv doctor`, and by `node.loss`.
MESSAGE = """✗ node {node} ended this node's part of the server [server.cluster]
  why:  {why}
  next: ./inv cluster.logs, then ./inv cluster.up"""


class NodeWatch:
    """Connections to the other nodes: the head has one to each worker, a worker one to the head.

    `loss` is a future: the name of the first node that ends the server, and the reason.
    """

    def __init__(self, settings: argparse.Namespace, token: str) -> None:
        self._settings, self._token = settings, token
        self._missing = set(settings.peers)
        self._writers: list[asyncio.StreamWriter] = []
        self.loss: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = "") -> None:
        """Read a node's lines until its connection ends. A connection without the token is closed without effect."""
        why = "its connection broke"
        try:
            while line := await asyncio.wait_for(reader.readline(), SILENT_SECONDS):
                message = _message(line)
                if not name:
                    if message.get("token") != self._token or message.get("hello") not in self._missing:
                        break
                    name = str(message["hello"])
                    self._missing.discard(name)
                    self._writers.append(writer)
                    print(f"node {name} joined", flush=True)
                if "end" in message:
                    self._lose(str(message.get("node") or name), str(message["end"]))
        except TimeoutError:
            why = f"it sent nothing for {SILENT_SECONDS:g} s"
        except ValueError:  # of readline
            why = "it sent a line that is too long"
        except OSError as error:
            why = f"its connection broke: {error.strerror}"
        writer.close()
        if name:
            self._lose(name, why)

    async def connect(self) -> None:
        """On a worker, connect to the head once it listens, and read its lines."""
        settings = self._settings
        while self._missing and not settings.listen:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(settings.address, settings.port, limit=LONGEST_LINE)
                self._missing.clear()
                self._writers.append(writer)
                self._send({"hello": settings.node, "token": self._token})
                await self.hear(reader, writer, settings.peers[0])
            await asyncio.sleep(TURN_SECONDS)

    async def beat(self) -> None:
        """Send a line every BEAT_SECONDS, so that the other nodes know that this node runs."""
        while True:
            self._send({})
            await asyncio.sleep(BEAT_SECONDS)

    def require_all(self) -> None:
        """Count nodes that have not connected as lost."""
        if self._missing:
            self._lose(", ".join(sorted(self._missing)), f"it did not connect within {self._settings.join:g} s")

    async def tell(self, node: str, why: str) -> None:
        """Send the other nodes the end of the server: `node` is the node that caused it, and `why` the reason."""
        await asyncio.sleep(TURN_SECONDS)  # to read the hello of a node that has just connected
        self._send({"node": node, "end": why})
        for writer in self._writers:
            with suppress(OSError):
                writer.write_eof()

    def _lose(self, node: str, why: str) -> None:
        if not self.loss.done():
            self.loss.set_result((node, why))

    def _send(self, message: dict[str, Any]) -> None:
        for writer in self._writers:
            writer.write(json.dumps(message).encode() + b"\n")  # `hear` notices a broken connection


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or too deep
        return {}
    return message if isinstance(message, dict) else {}


async def run(settings: argparse.Namespace, token: str) -> int:
    """Run the command to its end, or until another node ends it; return the exit code."""
    loop, supervisor, watch = asyncio.get_running_loop(), os.getppid(), NodeWatch(settings, token)
    stopped: asyncio.Future[int] = loop.create_future()
    short = asyncio.Event()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    loop.add_signal_handler(signal.SIGURG, short.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    tasks = [loop.create_task(work) for work in (watch.beat(), watch.connect())]

    def welcome(*streams: Any) -> None:  # as a coroutine, asyncio would log that it is cancelled at the end
        tasks.append(loop.create_task(watch.hear(*streams)))

    if settings.listen:
        await asyncio.start_server(welcome, settings.address, settings.port, limit=LONGEST_LINE)
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    child = await asyncio.create_subprocess_exec(*settings.command, env=environment)
    loop.call_later(settings.join, watch.require_all)
    ended = asyncio.create_task(child.wait())
    await asyncio.wait((ended, stopped, watch.loss), return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        why = STOPPED if os.getppid() == supervisor else ORPHANED
        await watch.tell(settings.node, MEMORY if short.is_set() else why)
        with suppress(ProcessLookupError):
            child.send_signal(stopped.result())
        code = await ended
        return code if code >= 0 else 128 - code
    if ended.done():
        code = ended.result()
        why = f"its server ended with code {code}" if code >= 0 else f"signal {-code} ended its server"
        await watch.tell(settings.node, why)
        print(f"the server of node {settings.node} ended with code {code}; the other nodes end too", flush=True)
        return code if code > 0 else ENDED
    node, why = watch.loss.result()
    await watch.tell(node, why)
    print(MESSAGE.format(node=node, why=why), flush=True)
    with suppress(ProcessLookupError):
        child.terminate()
        await asyncio.wait((ended,), timeout=GRACE_SECONDS)
        child.kill()
    await ended
    return ENDED


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(prog="watch", description=__doc__)
    result.add_argument("--node", required=True, help="this node's name")
    result.add_argument("--address", required=True, help="the head's address on the control network")
    result.add_argument("--port", type=int, required=True)
    result.add_argument("--listen", action="store_true", help="this is the head")
    result.add_argument("--peers", required=True, type=lambda text: text.split(","), help="the nodes to hear from")
    result.add_argument("--join", type=float, default=600.0, help="seconds in which they must connect")
    result.add_argument("command", nargs="+")
    return result


def options(node: str, address: str, port: int, peers: Sequence[str], *, listen: bool) -> tuple[str, ...]:
    """Return this program's options: a node's name, the head's address and port, and the nodes to hear from."""
    named = ("--node", node, "--address", address, "--port", str(port), "--peers", ",".join(peers))
    return (*named, *(("--listen",) if listen else ()))


def watched(command: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs `command` under this program. Its environment needs TOKEN."""
    return (sys.executable, "-P", __file__, *arguments, "--", *command)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(parser().parse_args(), os.environ.get(TOKEN, ""))))
