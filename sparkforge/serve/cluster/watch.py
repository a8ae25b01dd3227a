"""`python -P watch.py OPTIONS -- COMMAND`: runs a node's part of a server, and ends it when another node's has ended.

vLLM watches the workers of its own machine only: without this, a head whose other machine is gone keeps its port open
and answers nobody, and a worker whose head is gone waits for ever. The nodes hold a connection to the head on the
control network and send a line a second. A node whose connection breaks, which is silent, or which says that its server
has ended, ends all others, and each says in its log and in `--end` which node it was.

It runs as a file below the supervisor (sparkforge/serve/supervise.py) and imports the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # ten lines lost: the cable, the machine, or its kernel
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL: vLLM waits for answers that nobody can compute any more
TURN_SECONDS = 0.2
LONGEST_LINE = 4096  # bytes; a longer one is not of ours
ENDED = 24  # sparkforge.core.errors.ServerError's code
TOKEN = "SPARKFORGE_CLUSTER_TOKEN"  # noqa: S105 - a variable's name
MEMORY = "its memory guard ended it"  # serve/supervise.py sends SIGURG first, which whoever does not know it ignores
ORPHANED = "its supervisor was killed"  # the kernel sends SIGTERM then: serve/supervise.py asks for it
STOPPED = "it was stopped"  # by a signal: somebody's wish, or a machine that shuts down in order
END = "cluster.end.json"  # in SPARKFORGE_STATE: which other node ended this one's part
# Read by people, and by the doctor.
MESSAGE = """✗ node {node} ended this node's part of the server [server.cluster]
  why:  {why}
  next: ./inv cluster.logs, then ./inv cluster.up"""


@dataclass
class Peer:
    """A connection to another node: its name once it has said hello, what came of a line, and when the last came."""

    link: socket.socket
    name: str = ""
    rest: bytes = b""
    heard: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Loss:
    """Which node ended the server, and why."""

    node: str
    why: str


class NodeWatch:
    """Connections to the other nodes: the head has one to each worker, a worker one to the head."""

    def __init__(self, options: argparse.Namespace, token: str) -> None:
        self._options, self._token = options, token
        self._selector = selectors.DefaultSelector()
        self._peers: list[Peer] = []
        self._expected = set(options.peers)
        self._begun = self._beaten = time.monotonic()
        self._listener: socket.socket | None = None
        if options.listen:
            self._listener = socket.create_server((options.address, options.port))
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)

    def turn(self) -> Loss | None:
        """Listen for a moment, send what is due, and return the loss of a node if there is one."""
        now = time.monotonic()
        if not self._options.listen and not self._peers:
            self._connect()
        for key, _ in self._selector.select(TURN_SECONDS):
            if key.fileobj is self._listener:
                with suppress(OSError):
                    self._add(Peer(self._listener.accept()[0]))
            elif loss := self._read(key.data):
                return loss
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            self._send({})
        return self._silent(now)

    def tell(self, node: str, why: str) -> None:
        """Tell the other nodes that the server ends, and because of which node."""
        self._send({"node": node, "end": why})
        for peer in self._peers:
            with suppress(OSError):
                peer.link.shutdown(socket.SHUT_WR)

    def _connect(self) -> None:
        try:
            link = socket.create_connection((self._options.address, self._options.port), timeout=TURN_SECONDS)
        except OSError:  # the head is not there yet
            return
        self._add(Peer(link, name=self._options.peers[0]))
        self._send({"hello": self._options.node, "token": self._token})

    def _add(self, peer: Peer) -> None:
        peer.link.setblocking(False)
        self._peers.append(peer)
        self._selector.register(peer.link, selectors.EVENT_READ, peer)

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.link)
        peer.link.close()
        self._peers.remove(peer)

    def _read(self, peer: Peer) -> Loss | None:
        """Read what a peer sent. A stranger, who has no token, is dropped and changes nothing."""
        try:
            data = peer.link.recv(LONGEST_LINE)
        except BlockingIOError:
            return None
        except OSError as error:
            data, reason = b"", f"its connection broke: {error.strerror}"
        else:
            reason = "its connection broke"
        if not data:
            self._drop(peer)
            return Loss(peer.name, reason) if peer.name else None
        peer.heard = time.monotonic()
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            message = _message(line)
            if not peer.name:
                if message.get("token") != self._token or message.get("hello") not in self._expected:
                    self._drop(peer)
                    return None
                peer.name = str(message["hello"])
                self._expected.discard(peer.name)
            if "end" in message:
                return Loss(str(message.get("node") or peer.name), str(message["end"]))
        if len(peer.rest) > LONGEST_LINE:
            self._drop(peer)
            return Loss(peer.name, "it sent a line that is too long") if peer.name else None
        return None

    def _send(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            if self._options.listen and not peer.name:
                continue
            with suppress(OSError):  # a broken one is noticed when it is read
                peer.link.send(json.dumps(message).encode() + b"\n")

    def _silent(self, now: float) -> Loss | None:
        for peer in [peer for peer in self._peers if now - peer.heard > SILENT_SECONDS]:
            if not peer.name:  # a stranger who says nothing
                self._drop(peer)
            else:
                return Loss(peer.name, f"nothing came from it for {SILENT_SECONDS:g} s")
        waited = now - self._begun
        missing = self._expected if self._options.listen else () if self._peers else self._options.peers
        if missing and waited > self._options.join:
            return Loss(", ".join(sorted(missing)), f"it did not come within {self._options.join:g} s")
        return None


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or too deep
        return {}
    return message if isinstance(message, dict) else {}


def run(options: argparse.Namespace, token: str) -> int:
    """Run the command to its end, or until another node ends it; return the exit code."""
    watch = NodeWatch(options, token)
    stopped: list[int] = []
    short: list[int] = []
    supervisor = os.getppid()
    signal.signal(signal.SIGURG, lambda received, _frame: short.append(received))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stopped.append(received))
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    child = subprocess.Popen(options.command, env=environment)
    passed_on, loss = False, None
    while child.poll() is None:
        if stopped and not passed_on:
            passed_on = True
            why = STOPPED if os.getppid() == supervisor else ORPHANED
            watch.tell(options.node, MEMORY if short else why)
            child.send_signal(stopped[0])
        if loss := loss or (None if passed_on else watch.turn()):
            break
        if passed_on:
            time.sleep(TURN_SECONDS)
    if loss:
        watch.tell(loss.node, loss.why)
        print(MESSAGE.format(node=loss.node, why=loss.why), flush=True)
        _note(options.end, loss)
        _end(child)
        return ENDED
    code = child.returncode
    if not passed_on:
        watch.tell(
            options.node, f"its server ended with code {code}" if code >= 0 else f"signal {-code} ended its server"
        )
        print(f"the server of node {options.node} ended with code {code}; the other nodes end too", flush=True)
        return code if code > 0 else ENDED
    return code if code >= 0 else 128 - code


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _note(end: Path | None, loss: Loss) -> None:
    if end:
        with suppress(OSError):
            temporary = end.with_name(f".{end.name}.{os.getpid()}.tmp")
            temporary.write_text(
                json.dumps({"node": loss.node, "why": loss.why, "time": time.time()}), encoding="utf-8"
            )
            temporary.replace(end)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(prog="watch", description=__doc__)
    result.add_argument("--node", required=True, help="this node's name")
    result.add_argument("--address", required=True, help="the head's, on the control network")
    result.add_argument("--port", type=int, required=True)
    result.add_argument("--listen", action="store_true", help="this is the head")
    result.add_argument("--peers", required=True, type=lambda text: text.split(","), help="the nodes to hear from")
    result.add_argument("--join", type=float, default=600.0, help="seconds in which they must have come")
    result.add_argument("--end", type=Path, help="JSON file to write when another node ended the server")
    result.add_argument("command", nargs="+")
    return result


@dataclass(frozen=True)
class Watched:
    """A node that watches others: its name, the head's address and port, and whom it hears. The head listens."""

    node: str
    address: str
    port: int
    peers: tuple[str, ...]
    listen: bool


def watched(command: Sequence[str], node: Watched, end: Path) -> tuple[str, ...]:
    """Return the command that runs `command` under this program. Its environment needs TOKEN."""
    return (sys.executable, "-P", __file__, *watch_options(node), "--end", str(end), "--", *command)


def watch_options(node: Watched) -> tuple[str, ...]:
    """Return this program's options."""
    options = ("--node", node.node, "--address", node.address, "--port", str(node.port))
    return (*options, "--peers", ",".join(node.peers), *(("--listen",) if node.listen else ()))


if __name__ == "__main__":
    arguments = parser().parse_args()
    sys.exit(run(arguments, os.environ.get(TOKEN, "")))
