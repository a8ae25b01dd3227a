"""`python -m sparkforge.serve.cluster.node < REQUEST`: one node's part of a cluster, as its head asks for it over ssh.

The request is a JSON object with an `action` and the cluster's configuration; the answer is a JSON object on stdout,
and messages for people go to stderr. It uses what serves one machine: validator, launch, record and log.

  validate  run the validator for this node's part of the server
  begin     start a worker and return at once
  start     start the head's part, or a replica, and wait until it has answered its first requests
  balance   start the endpoint of replicas and wait until one of them answers through it
  status    say whether this node's part runs, and how it ended
  logs      the last `lines` of its log
  down      end it, and what a killed one left
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from sparkforge.core import interrupt, openai, paths
from sparkforge.core.console import Steps, echo, show_error
from sparkforge.core.documents import parse_json, read_json
from sparkforge.core.errors import InputError, ServerError, SparkforgeError
from sparkforge.core.files import write_atomic
from sparkforge.core.openai import Endpoint
from sparkforge.core.process import TAIL_LINES, run
from sparkforge.core.tables import Record
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import access, embedded, environment, launch, logs, record
from sparkforge.serve.cluster import balancer, containers, watch
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.launch import Launch
from sparkforge.serve.plan import StartPlan

LINES = 400
BALANCE_SECONDS = 30.0


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


def end_path() -> Path:
    """Return where it is written which other node ended this one's part."""
    return paths.state() / watch.END


def _planned(request: NodeRequest) -> StartPlan:
    """Return the plan of this node's part, checked. Raises what `embedded.checked` raises."""
    config, node = request.config, request.node
    is_replica = config.mode == "replicas"
    plan = StartPlan(
        EMBEDDED,
        model=config.model,
        profile=config.profile,
        port=config.replica_port if is_replica else config.port,
        host=node.address if is_replica else "",
        key_file=((is_replica or node == config.head) and config.key_file) or None,
        flags=(*(() if is_replica else config.engine_flags(node)), *config.flags),
    )
    # The balancer passes on the Host header of its clients.
    hosts = tuple(access.loopback_hosts(config.port)) if is_replica else ()
    return replace(embedded.checked(plan), hosts=hosts)


def describe(request: NodeRequest) -> Launch:
    """Return what starts this node's part.

    Raises what `embedded.checked`, `environment.prepare` and `embedded.write_tiny` raise.
    """
    config, node, plan = request.config, request.node, _planned(request)
    python = _interpreter(node)
    is_head, is_replica = node == config.head, config.mode == "replicas"
    described = embedded.describe(plan, python, embedded.model_folder(plan, python))
    if is_replica:
        return described
    command = watch.watched(
        described.command,
        node=node.name,
        address=config.head.address,
        port=config.watch_port,
        peers=[worker.name for worker in config.workers] if is_head else [config.head.name],
        listen=is_head,
        end=end_path(),
    )
    variables = {**described.environment, **node.variables, watch.TOKEN: request.token}
    return replace(described, command=command, environment=variables)


def validate(request: NodeRequest) -> dict[str, Any]:
    """Validate this node's part.

    Raises RefusalError; ServerError if a server of this checkout runs, which a failed start would end with the rest;
    and what `embedded.checked` raises.
    """
    launch.refuse_second()
    plan = _planned(request)  # before an environment is made
    python = _interpreter(request.node)
    verdict = embedded.validate(plan, python, embedded.model_folder(plan, python))
    return {"verdict": verdict}


def begin(request: NodeRequest) -> dict[str, Any]:
    """Start a worker. Raises what `launch.starting` and `launch.begin` raise."""
    with launch.starting():
        end_path().unlink(missing_ok=True)
        return {"pid": launch.begin(describe(request)).pid}


def start(request: NodeRequest) -> dict[str, Any]:
    """Start the head and wait for its first answers.

    Raises what `launch.start` raises; where another node ended it, a ServerError that names that node.
    """
    with launch.starting():
        end_path().unlink(missing_ok=True)
        try:
            server = launch.start(describe(request), lambda _: None)
        except ServerError:
            if loss := lost():
                fix = "./inv cluster.logs"
                raise ServerError(
                    f"node {loss['node']} ended the start", loss["why"], fix, code="server.cluster"
                ) from None
            raise
    return {"pid": server.pid, "url": server.url, "model": server.model_id, "proof": server.proof}


def balance(request: NodeRequest) -> dict[str, Any]:
    """Start the endpoint of replicas.

    Raises UsageError without HAProxy, ServerError if no replica answers through it or one has another key.

    Its record and log lie in a state folder of its own, so `status`, `logs` and `down` work as for a server.
    """
    config, file = request.config, paths.state() / balancer.FILE
    key = access.read_key(Path(config.key_file))
    for node in config.nodes:
        if not Endpoint(f"http://{node.address}:{config.replica_port}", key=key).accepts_key():
            why = f"its {config.key_file} is another one than the head's: clients would be refused now and then"
            raise ServerError(
                f"{node.name} does not take the API key", why, "one key_file for all", code="server.cluster"
            )
    write_atomic(file, balancer.text(config))
    command = balancer.command(file)
    run([*command, "-c"], fix=f"less {file}")
    with launch.starting():
        launch.check_free(config.port)
        server = launch.begin(Launch(command, {}, StartPlan(balancer.PROGRAM, port=config.port), Path()))
        deadline = time.monotonic() + BALANCE_SECONDS
        if not openai.wait_until(Endpoint(server.url).healthy, deadline, lambda: server.alive):
            why = "\n".join(logs.read(record.log_path()).splitlines()[-TAIL_LINES:]) or "its log is empty"
            launch.stop()
            raise ServerError(
                "no replica answers through the balancer", why, "./inv cluster.check", code="server.cluster"
            )
    return {"pid": server.pid, "url": server.url}


def lost() -> Mapping[str, str] | None:
    """Return which other node ended this one's part, and why; None if none did."""
    with suppress(OSError, ValueError):
        note = read_json(end_path())
        if isinstance(note, dict) and {"node", "why"} <= note.keys():
            return {"node": str(note["node"]), "why": str(note["why"])}
    return None


def _interpreter(node: ClusterNode) -> Path:
    return Path(node.python) if node.python else environment.prepare(Steps(1)).python


def status(_request: NodeRequest) -> dict[str, Any]:
    """Say whether this node's part runs; if it has ended, how, which node it was, and whether somebody asked for it."""
    server = record.read()
    if server is None:
        return {"state": "stopped"}
    if server.alive:
        return {"state": "running", "pid": server.pid, "milestone": logs.milestone(logs.read(Path(server.log)))}
    loss = lost()
    why = f"node {loss['node']}: {loss['why']}" if loss else record.how_it_ended(server)
    end = record.ended(server)
    asked = loss["why"] == watch.STOPPED if loss else bool(end and end.asked)
    return {"state": "ended", "why": why, "asked": asked, "left": len(record.leftovers())}


def tail(request: NodeRequest) -> dict[str, Any]:
    """Return the last lines of the log."""
    return {"lines": logs.read(record.log_path()).splitlines()[-request.lines :]}


def down(_request: NodeRequest) -> dict[str, Any]:
    """End this node's part, and what a killed one left."""
    try:
        stopped = launch.down()
    except ServerError as error:
        if error.code != "server.not-running":
            raise
        record.forget()
        return {"state": "nothing to stop"}
    return {"state": f"stopped {stopped.where}" if stopped else "ended what was left"}


ACTIONS: Mapping[str, Callable[[NodeRequest], dict[str, Any]]] = {
    "validate": validate,
    "begin": begin,
    "start": start,
    "balance": balance,
    "status": status,
    "logs": tail,
    "down": down,
}


def in_container(request: NodeRequest) -> dict[str, Any]:
    """Do what is asked for where the parts are containers. Raises InputError for what only the embedded device has."""
    config, node = request.config, request.node
    match request.action:
        case "validate":
            return containers.validate(config, node)
        case "begin":
            with launch.starting():
                return containers.begin(config, node, request.token)
        case "start":
            with launch.starting():
                return containers.start(config, node, request.token)
        case "status":
            return containers.status()
        case "logs":
            return containers.tail(request.lines)
        case "down":
            containers.keep_log()  # the record's container is removed by `down` already
            stopped = down(request)
            return containers.down() if containers.identity() else stopped
    raise InputError(f"there is no {request.action} in a container", "it is not built", 'device = "embedded"')


def main() -> int:
    """Read the request from stdin and answer it; returns the exit code. An error is an answer too."""
    try:
        try:
            request = NodeRequest.model_validate(parse_json(sys.stdin.read(), "the request"))
        except ValidationError as error:
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise InputError("the request is malformed", why, "the same Sparkforge on every node: git pull") from error
        if request.action not in ACTIONS:
            why, fix = f"there is no action {request.action[:40]!r}", "the same Sparkforge on every node: git pull"
            raise InputError("the request is malformed", why, fix)
        paths.secure_state()
        with interrupt.caught():
            answer = (in_container if request.config.in_containers else ACTIONS[request.action])(request)
    except SparkforgeError as error:
        show_error(error)
        answer = {"error": {"what": error.what, "why": error.why, "fix": error.fix, "code": error.code}}
    echo(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
