"""`python -m sparkforge.serve.cluster.node < REQUEST`: one node's part of a cluster, as its head asks for it over ssh.

The request is a JSON object with an `action` and the cluster's configuration; the answer is a JSON object on stdout,
and messages for people go to stderr. It uses what serves one machine: validator, launch, record and log.

  validate  run the validator for this node's part of the server
  begin     start a worker and return at once
  start     start the head's part, a replica or the endpoint of replicas, and wait for its first answers
  status    say whether this node's part runs, and how it ended
  logs      the last `lines` of its log
  down      end it, and what a killed one left
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkforge.core import interrupt, openai, paths
from sparkforge.core.console import echo, show_error
from sparkforge.core.documents import DocumentError, read_json
from sparkforge.core.errors import InputError, ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_atomic
from sparkforge.core.openai import Endpoint
from sparkforge.core.process import TAIL_LINES, run
from sparkforge.core.tables import Record, parse_object
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import access, launch
from sparkforge.serve.cluster import watch
from sparkforge.serve.cluster.config import BALANCER, ClusterConfig, ClusterNode
from sparkforge.serve.cluster.containers import ContainerNode, transport
from sparkforge.serve.devices.device import Device
from sparkforge.serve.devices.embedded import Embedded
from sparkforge.serve.launch import Launch
from sparkforge.serve.plan import LOOPBACK, StartPlan
from sparkforge.serve.record import Server

LINES = 400
BALANCE_SECONDS = 30.0
HAPROXY = "haproxy"
SYSTEM_FOLDERS = ":/usr/local/sbin:/usr/sbin"  # Debian leaves them out of a user's PATH
# An answer may take as long as it likes, and so may the pause before a client's next request. `redispatch` and
# `retry-on conn-failure`: a request that a dead server never got goes to another one; one that it got is not repeated.
TEMPLATE = """\
# Written by ./inv cluster.up from cluster.toml.
global
    log stdout format raw daemon notice
    maxconn 4096

defaults
    mode http
    log global
    timeout connect 5s
    timeout http-request 60s
    timeout client 1h
    timeout server 1h
    retries 2
    retry-on conn-failure
    option redispatch 1

frontend api
    bind {bind}
    use_backend sessions if {{ req.hdr(x-session-id) -m found }}
    default_backend servers

backend servers
    balance leastconn
    option httpchk
    http-check send meth GET uri /health ver HTTP/1.1 hdr Host {bind}
{checked}

backend sessions
    balance hdr(x-session-id)
    hash-type consistent
{tracked}
"""


class NodeRequest(Record):
    """What the head asks of the node called `name`. `token` is that of this start; nobody else has it."""

    action: str
    name: str
    config: ClusterConfig
    token: str = ""
    lines: int = Field(default=40, ge=1, le=LINES)

    @property
    def node(self) -> ClusterNode:
        """This node, or the balancer. Raises InputError for a name that the configuration lacks."""
        for node in self.config.parts:
            if node.name == self.name:
                return node
        raise InputError(f"there is no node {self.name!r}", "the request is malformed", "./inv cluster.status")


class NodeError(Record):
    """A SparkforgeError as an answer."""

    what: str
    why: str
    fix: str
    code: str


class NodeAnswer(Record, extra="allow"):
    """A node's answer: an error, or what `ANSWER_KEYS` names for the action, and more for people and programs."""

    error: NodeError | None = None
    state: str = ""
    why: str = ""
    milestone: str = ""
    verdict: str = ""
    url: str = ""
    transport: str = ""
    lines: tuple[str, ...] = ()


STATE = "state"
ANSWER_KEYS = {"validate": "verdict", "begin": STATE, "start": "url", "status": STATE, "logs": "lines", "down": STATE}


def end_path() -> Path:
    """Return where it is written which other node ended this one's part."""
    return paths.state() / watch.END


def lost() -> Mapping[str, str] | None:
    """Return which other node ended this one's part, and why; None if none did."""
    with suppress(OSError, ValueError):
        note = read_json(end_path())
        if isinstance(note, dict) and {"node", "why"} <= note.keys():
            return {"node": str(note["node"]), "why": str(note["why"])}
    return None


class EmbeddedNode(Embedded):
    """A node's part on the embedded device: a replica, or a part that ends with the other nodes' parts."""

    def __init__(self, config: ClusterConfig, node: ClusterNode, token: str = "") -> None:
        self.config, self.node, self.token = config, node, token
        self.is_replica = config.mode == "replicas"
        plan = StartPlan(
            EMBEDDED,
            model=config.model,
            profile=config.profile,
            port=config.replica_port if self.is_replica else config.port,
            host=node.address if self.is_replica else "",
            key_file=((self.is_replica or node == config.head) and config.key_file) or None,
            flags=(*(() if self.is_replica else config.engine_flags(node)), *config.flags),
        )
        super().__init__(plan, Path(node.python) if node.python else None)
        # The balancer passes on the Host header of its clients.
        hosts = tuple(access.loopback_hosts(config.port)) if self.is_replica else ()
        self.plan = replace(self.plan, hosts=hosts)

    def launch(self) -> Launch:
        """Return the start of this node's part of the model, or of its replica, which starts as on one machine."""
        launch = super().launch()
        if self.is_replica:
            return launch
        command = watch.watched(launch.command, self.config.watch_options(self.node), end_path())
        variables = {**launch.environment, **self.node.variables, watch.TOKEN: self.token}
        return replace(launch, command=command, environment=variables)

    def begin(self) -> None:
        """Start a worker and return at once."""
        end_path().unlink(missing_ok=True)
        launch.begin(self.launch())

    def start(self) -> Server:
        """Start the head's part or a replica. Raises a ServerError that names the node that ended it, if one did."""
        end_path().unlink(missing_ok=True)
        try:
            return super().start()
        except ServerError:
            if loss := lost():
                failure, fix = f"node {loss['node']} ended the start", "./inv cluster.logs"
                raise ServerError(failure, loss["why"], fix, code="server.cluster") from None
            raise

    @classmethod
    def state(cls) -> dict[str, Any]:
        """Say how the part is, and which other node ended it."""
        state = super().state()
        if state["state"] == "ended" and (loss := lost()):
            state |= {"why": f"node {loss['node']}: {loss['why']}", "asked": loss["why"] == watch.STOPPED}
        return state


def haproxy() -> str:
    """Return HAProxy's path. Raises UsageError if it is not installed."""
    if path := shutil.which(HAPROXY, path=os.environ.get("PATH", os.defpath) + SYSTEM_FOLDERS):
        return path
    why = "it is the endpoint of independent servers"
    raise UsageError(f"{HAPROXY} is not installed on the head", why, f"sudo apt install {HAPROXY}")


def haproxy_text(config: ClusterConfig) -> str:
    """Return HAProxy's configuration."""
    addresses = [(node.name, f"{node.address}:{config.replica_port}") for node in config.nodes]
    checked = "\n".join(f"    server {name} {address} check inter 2s fall 2 rise 2" for name, address in addresses)
    tracked = "\n".join(f"    server {name} {address} track servers/{name}" for name, address in addresses)
    return TEMPLATE.format(bind=f"{LOOPBACK}:{config.port}", checked=checked, tracked=tracked)


class Balancer(Device):
    """The endpoint of replicas: HAProxy on the head, with a state folder, a record and a log of its own.

    It sends a request to the server with the fewest open ones; requests with the same `X-Session-Id` go to the same
    server, whose prefix cache has the conversation. A server that does not answer /health gets no requests.
    """

    def __init__(self, config: ClusterConfig, _node: ClusterNode, _token: str = "") -> None:
        super().__init__(StartPlan(HAPROXY, port=config.port))
        self.config = config

    def prepare(self) -> None:
        """Make nothing: HAProxy is the distribution's."""

    def validate(self) -> str:
        """Ask every replica with the key. Raises ServerError for one with another key."""
        key = access.read_key(Path(self.config.key_file))
        for node in self.config.nodes:
            if not Endpoint(f"http://{node.address}:{self.config.replica_port}", key=key).accepts_key():
                failure = f"{node.name} does not take the API key"
                why = f"its {self.config.key_file} is another one than the head's: some clients would be refused"
                raise ServerError(failure, why, "one key_file for all", code="server.cluster")
        return "every replica takes the key"

    def start(self) -> Server:
        """Start HAProxy. Raises UsageError without it, ServerError if no replica answers through it."""
        self.validate()
        file = paths.state() / "haproxy.cfg"
        write_atomic(file, haproxy_text(self.config))
        command = (haproxy(), "-db", "-f", str(file))
        run([*command, "-c"], fix=f"less {file}")
        launch.check_free(self.config.port)
        server = launch.begin(Launch(command, {}, self.plan, Path()))
        deadline = time.monotonic() + BALANCE_SECONDS
        if not openai.wait_until(Endpoint(server.url).healthy, deadline, lambda: server.alive):
            why = "\n".join(self.log().splitlines()[-TAIL_LINES:]) or "its log is empty"
            launch.stop()
            fix = "./inv cluster.check"
            raise ServerError("no replica answers through the balancer", why, fix, code="server.cluster")
        return server


Part = EmbeddedNode | ContainerNode | Balancer


def answer(request: NodeRequest) -> dict[str, Any]:
    """Do what is asked for. Raises the errors of the part, and InputError for an action that there is not."""
    config = request.config
    part: type[Part] = EmbeddedNode
    if request.name == BALANCER and config.mode == "replicas":
        part = Balancer
    elif config.in_containers:
        part = ContainerNode
    match request.action:
        case "validate":
            launch.refuse_second()  # a failed start would end it with the rest
            device = part(config, request.node, request.token)
            device.prepare()
            return {"verdict": device.validate()}
        case "begin" | "start":
            with launch.starting():
                device = part(config, request.node, request.token)
                device.prepare()
                if request.action == "begin" and not isinstance(device, Balancer):
                    device.begin()
                    return {"state": "running"}
                server = device.start()
            carried = transport(device.log()).description if config.has_gpus else ""
            facts = {"url": server.url, "model": server.model_id, "proof": server.proof}
            return {**facts, **({"transport": carried} if carried else {})}
        case "status":
            return part.state()
        case "logs":
            return {"lines": part.log().splitlines()[-request.lines :]}
        case "down":
            return {"state": part.stop()}
    why, fix = f"there is no action {request.action[:40]!r}", "the same Sparkforge on every node: git pull"
    raise InputError("the request is malformed", why, fix)


def main() -> int:
    """Read the request from stdin and answer it; returns the exit code. An error is an answer too."""
    try:
        try:
            request = NodeRequest.model_validate(parse_object(sys.stdin.read(), "the request", NodeRequest))
        except DocumentError as error:
            fix = "the same Sparkforge on every node: git pull"
            raise InputError("the request is malformed", error.why, fix) from error
        paths.secure_state()
        with interrupt.caught():
            document = answer(request)
    except SparkforgeError as error:
        show_error(error)
        document = {"error": {"what": error.what, "why": error.why, "fix": error.fix, "code": error.code}}
    echo(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
