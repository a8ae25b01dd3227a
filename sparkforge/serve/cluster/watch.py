"""`python -P watch.py OPTIONS -- COMMAND`: run a node's part of a server, and end it when another node's part ends.

vLLM watches the workers of its own machine only: without this, a head that has lost a worker keeps its port open and
answers nobody, and a worker whose head is gone waits for ever. The nodes hold a connection to the head on the control
network and send a line a second. If a node's connection breaks, its lines stop, or it reports that its server has
ended, all other nodes end their parts, and write the node's name into their log and the file `--end`.

It runs as a file below the supervisor (sparkforge/serve/supervise.py) and imports the standard library alone.
"""

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
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL: vLLM waits for answers that cannot be computed any more
TURN_SECONDS = 0.2
LONGEST_LINE = 4096  # bytes; we send no longer ones
ENDED = 24  # sparkforge.core.errors.ServerError's code
TOKEN = "SPARKFORGE_CLUSTER_TOKEN"  # noqa: S105 - a variable's name
MEMORY = "its memory guard ended it"  # serve/supervise.py sends SIGURG first, which other programs ignore
ORPHANED = "its supervisor was killed"  # the kernel then sends SIGTERM, by PR_SET_PDEATHSIG in serve/supervise.py
STOPPED = "it was stopped"  # by a signal: on request, or because the machine shuts down in order
END = "cluster.end.json"  # in SPARKFORGE_STATE: which other node ended this one's part
# Read by people, and by the doctor.
MESSAGE = """✗ node {node} ended this node's part of the server [server.cluster]
  why:  {why}
  next: ./inv cluster.logs, then ./inv cluster.up"""


@dataclass
class Peer:
    """A connection to another node: its name after its hello, the begun line, and the time of the last data."""

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

    def __init__(self, settings: argparse.Namespace, token: str) -> None:
        self._settings, self._token = settings, token
        self._selector = selectors.DefaultSelector()
        self._peers: list[Peer] = []
        self._expected = set(settings.peers)
        self._begun = self._beaten = time.monotonic()
        self._listener: socket.socket | None = None
        if settings.listen:
            self._listener = socket.create_server((settings.address, settings.port))
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)

    def turn(self) -> Loss | None:
        """Receive for a moment, send a line if it is due, and return the loss of a node if there is one."""
        now = time.monotonic()
        if not self._settings.listen and not self._peers:
            with suppress(OSError):  # the head may not listen yet
                link = socket.create_connection((self._settings.address, self._settings.port), timeout=TURN_SECONDS)
                self._add(Peer(link, name=self._settings.peers[0]))
                self._send({"hello": self._settings.node, "token": self._token})
        if loss := self._receive(TURN_SECONDS):
            return loss
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            self._send({})
        for peer in [peer for peer in self._peers if now - peer.heard > SILENT_SECONDS]:
            if peer.name:
                return Loss(peer.name, f"it sent nothing for {SILENT_SECONDS:g} s")
            self._drop(peer)  # a connection that sent no token
        missing = self._expected if self._settings.listen else () if self._peers else self._settings.peers
        if missing and now - self._begun > self._settings.join:
            return Loss(", ".join(sorted(missing)), f"it did not connect within {self._settings.join:g} s")
        return None

    def tell(self, node: str, why: str) -> None:
        """Tell the other nodes, also those that have just connected, that the server ends and because of which node."""
        for _ in ("connection", "hello"):
            self._receive(0)
        self._send({"node": node, "end": why})
        for peer in self._peers:
            with suppress(OSError):
                peer.link.shutdown(socket.SHUT_WR)

    def _receive(self, seconds: float) -> Loss | None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                with suppress(OSError):
                    self._add(Peer(self._listener.accept()[0]))
            elif loss := self._read(key.data):
                return loss
        return None

    def _add(self, peer: Peer) -> None:
        peer.link.setblocking(False)
        self._peers.append(peer)
        self._selector.register(peer.link, selectors.EVENT_READ, peer)

    def _drop(self, peer: Peer) -> None:
        self._selector.unregister(peer.link)
        peer.link.close()
        self._peers.remove(peer)

    def _read(self, peer: Peer) -> Loss | None:
        """Read a peer's message. A connection without the token is dropped and changes nothing."""
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
                print(f"node {peer.name} joined", flush=True)
            if "end" in message:
                return Loss(str(message.get("node") or peer.name), str(message["end"]))
        if len(peer.rest) > LONGEST_LINE:
            self._drop(peer)
            return Loss(peer.name, "it sent a line that is too long") if peer.name else None
        return None

    def _send(self, message: dict[str, Any]) -> None:
        for peer in self._peers:
            if self._settings.listen and not peer.name:
                continue
            with suppress(OSError):  # a broken connection is noticed when it is read
                peer.link.send(json.dumps(message).encode() + b"\n")


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or too deep
        return {}
    return message if isinstance(message, dict) else {}


def run(settings: argparse.Namespace, token: str) -> int:
    """Run the command to its end, or until another node ends it; return the exit code."""
    watch = NodeWatch(settings, token)
    stopped, short = list[int](), list[int]()
    supervisor = os.getppid()
    signal.signal(signal.SIGURG, lambda received, _frame: short.append(received))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stopped.append(received))
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    child = subprocess.Popen(settings.command, env=environment)
    passed_on, loss = False, None
    while child.poll() is None:
        if stopped and not passed_on:
            passed_on = True
            why = STOPPED if os.getppid() == supervisor else ORPHANED
            watch.tell(settings.node, MEMORY if short else why)
            child.send_signal(stopped[0])
        if loss := loss or (None if passed_on else watch.turn()):
            break
        if passed_on:
            time.sleep(TURN_SECONDS)
    if loss:
        watch.tell(loss.node, loss.why)
        print(MESSAGE.format(node=loss.node, why=loss.why), flush=True)
        if settings.end:
            temporary = settings.end.with_name(f".{settings.end.name}.{os.getpid()}.tmp")
            with suppress(OSError):
                temporary.write_text(json.dumps({"node": loss.node, "why": loss.why}), encoding="utf-8")
                temporary.replace(settings.end)
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return ENDED
    code = child.returncode
    if not passed_on:
        why = f"its server ended with code {code}" if code >= 0 else f"signal {-code} ended its server"
        watch.tell(settings.node, why)
        print(f"the server of node {settings.node} ended with code {code}; the other nodes end too", flush=True)
        return code if code > 0 else ENDED
    return code if code >= 0 else 128 - code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(prog="watch", description=__doc__)
    result.add_argument("--node", required=True, help="this node's name")
    result.add_argument("--address", required=True, help="the head's address on the control network")
    result.add_argument("--port", type=int, required=True)
    result.add_argument("--listen", action="store_true", help="this is the head")
    result.add_argument("--peers", required=True, type=lambda text: text.split(","), help="the nodes to hear from")
    result.add_argument("--join", type=float, default=600.0, help="seconds in which they must connect")
    result.add_argument("--end", type=Path, help="JSON file to write when another node ended the server")
    result.add_argument("command", nargs="+")
    return result


def options(node: str, address: str, port: int, peers: Sequence[str], *, listen: bool) -> tuple[str, ...]:
    """Return this program's options: a node's name, the head's address and port, and the nodes to hear from."""
    named = ("--node", node, "--address", address, "--port", str(port), "--peers", ",".join(peers))
    return (*named, *(("--listen",) if listen else ()))


def watched(command: Sequence[str], arguments: Sequence[str], end: Path) -> tuple[str, ...]:
    """Return the command that runs `command` under this program. Its environment needs TOKEN."""
    return (sys.executable, "-P", __file__, *arguments, "--end", str(end), "--", *command)


if __name__ == "__main__":
    sys.exit(run(parser().parse_args(), os.environ.get(TOKEN, "")))
