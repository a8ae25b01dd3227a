"""`python -m sparkforge.serve.cluster.node < REQUEST`: one node's part of a cluster, as its head asks for it over ssh.

The request is a JSON object with an `action` and the cluster's configuration; the answer is a JSON object on stdout,
and messages for people go to stderr. It uses what serves one machine: validator, launch, record and log.

  validate  run the validator for this node's part of the server
  begin     start a worker and return at once
  start     start the head's part, and wait for its first answers
  status    say whether this node's part runs, and how it ended
  logs      the last `lines` of its log
  down      end it, and what a killed one left
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkforge.core import interrupt, paths
from sparkforge.core.console import echo, show_error
from sparkforge.core.documents import DocumentError, read_json
from sparkforge.core.errors import InputError, ServerError, SparkforgeError
from sparkforge.core.tables import Record, parse_record
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import launch
from sparkforge.serve.cluster import watch
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.cluster.containers import ContainerNode, transport
from sparkforge.serve.devices.embedded import Embedded
from sparkforge.serve.launch import Launch
from sparkforge.serve.plan import StartPlan
from sparkforge.serve.record import Server

LINES = 400


class NodeRequest(Record):
    """The head's request to the node called `name`. `token` is the secret of this start."""

    action: str
    name: str
    config: ClusterConfig
    token: str = ""
    lines: int = Field(default=40, ge=1, le=LINES)

    @property
    def node(self) -> ClusterNode:
        """This node. Raises InputError for a name that the configuration lacks."""
        for node in self.config.nodes:
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
    """Return the path of the record of the node that ended this one's part."""
    return paths.state() / watch.END


def lost() -> Mapping[str, str] | None:
    """Return which other node ended this one's part, and why; None if none did."""
    with suppress(OSError, ValueError):
        note = read_json(end_path())
        if isinstance(note, dict) and {"node", "why"} <= note.keys():
            return {"node": str(note["node"]), "why": str(note["why"])}
    return None


class EmbeddedNode(Embedded):
    """A node's part on the embedded device, which ends with the other nodes' parts."""

    def __init__(self, config: ClusterConfig, node: ClusterNode, token: str = "") -> None:
        self.config, self.node, self.token = config, node, token
        plan = StartPlan(
            EMBEDDED,
            model=config.model,
            profile=config.profile,
            port=config.port,
            key_file=(node == config.head and config.key_file) or None,
            flags=(*config.engine_flags(node), *config.flags),
        )
        super().__init__(plan, Path(node.python) if node.python else None)

    def launch(self) -> Launch:
        """Return the start of this node's part of the model."""
        launch = super().launch()
        command = watch.watched(launch.command, self.config.watch_options(self.node), end_path())
        variables = {**launch.environment, **self.node.variables, watch.TOKEN: self.token}
        return replace(launch, command=command, environment=variables)

    def begin(self) -> None:
        """Start a worker and return at once."""
        end_path().unlink(missing_ok=True)
        launch.begin(self.launch())

    def start(self) -> Server:
        """Start the head's part. Raises a ServerError that names the node that ended it, if one did."""
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


def answer(request: NodeRequest) -> dict[str, Any]:
    """Do what is asked for. Raises the errors of the part, and InputError for an action that there is not."""
    config = request.config
    part: type[EmbeddedNode | ContainerNode] = ContainerNode if config.in_containers else EmbeddedNode
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
                if request.action == "begin":
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
    why, fix = f"there is no action {request.action[:40]!r}", "git pull   # on every node: the same Sparkforge"
    raise InputError("the request is malformed", why, fix)


def main() -> int:
    """Read the request from stdin and answer it; returns the exit code. An error is an answer too."""
    try:
        try:
            request = parse_record(sys.stdin.read(), "the request", NodeRequest)
        except DocumentError as error:
            fix = "git pull   # on every node: the same Sparkforge"
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
