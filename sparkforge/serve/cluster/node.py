"""`python -m sparkforge.serve.cluster.node < REQUEST`: runs a request of the head on one node of a cluster.

The request arrives over ssh. It is a JSON object with an `action` and the cluster's configuration. The answer is a JSON
object on stdout, and messages for people go to stderr. Validator, launch, record and log are those of a single machine.

  validate  run the validator for this node's part of the server
  begin     start a worker and return at once
  start     start the head's part, and wait for its first answers
  status    return whether this node's part runs, and how it ended
  logs      the last `lines` of its log
  down      end it, and the processes that a killed server left
"""

import json
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sparkforge.core import interrupt, paths
from sparkforge.core.console import echo, show_error
from sparkforge.core.docker import docker, docker_logged
from sparkforge.core.errors import EngineError, InputError, RefusalError, ServerError, SparkforgeError, on
from sparkforge.core.files import DocumentError, write_atomic
from sparkforge.core.tables import Record, parse_record
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine
from sparkforge.image.compose import SERVICE
from sparkforge.serve import access, entrypoint, launch, logs, record
from sparkforge.serve.cluster import watch
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.devices.container import Container, last_log
from sparkforge.serve.devices.in_environment import Embedded
from sparkforge.serve.launch import Launch
from sparkforge.serve.record import LOOPBACK, Server, StartPlan

LINES = 400


class NodeRequest(Record):
    """The head's request to the node called `name`. `token` is the secret of this start."""

    action: Literal["validate", "begin", "start", "status", "logs", "down"]
    name: str
    config: ClusterConfig
    token: str = ""
    lines: int = Field(default=40, ge=1, le=LINES)

    @property
    def node(self) -> ClusterNode:
        """This node. Raises InputError if the configuration has no node of that name."""
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
    """A node's answer: an error, or the key of the action in `ANSWER_KEYS`, and further keys."""

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


def loss(log: str) -> tuple[str, str] | None:
    """Return the node that ended this node's part, and the reason, from the part's log; None if no node did."""
    losses = re.findall(r"^✗ node (.+) ended this node's part.*\n\s*why:\s*(.*)$", log, re.MULTILINE)
    return losses[-1] if losses else None


def _plan(config: ClusterConfig, node: ClusterNode) -> StartPlan:
    is_head = node == config.head
    port = (f"--port={config.port}",) if is_head and config.in_containers else ()
    return StartPlan(
        config.device,
        model=config.model,
        profile=config.profile,
        stack=config.stack,
        port=config.port,
        key_file=(config.key_file or None) if is_head else None,  # a worker answers no client
        flags=(*config.engine_flags(node), *port, *config.flags),
    )


class EmbeddedNode(Embedded):
    """A node's part on the embedded device, which ends with the other nodes' parts."""

    def __init__(self, config: ClusterConfig, node: ClusterNode, token: str = "") -> None:
        self.config, self.node, self.token = config, node, token
        super().__init__(_plan(config, node), Path(node.python) if node.python else None)

    def launch(self) -> Launch:
        """Return the start of this node's part of the model."""
        launch = super().launch()
        command = watch.watched(launch.command, self.config.watch_options(self.node))
        variables = {**launch.environment, **self.node.variables, watch.TOKEN: self.token}
        return replace(launch, command=command, environment=variables)

    def begin(self) -> None:
        """Start a worker and return at once."""
        launch.begin(self.launch())

    def start(self) -> Server:
        """Start the head's part. Raises ServerError; if another node ended the start, the error names that node."""
        earlier = self.log()  # the old log stays if the start fails before it begins a new one
        try:
            return super().start()
        except ServerError:
            if not (lost := loss(self.log().removeprefix(earlier))):
                raise
            failure, fix = f"node {lost[0]} ended the start", "./inv cluster.logs"
            raise ServerError(failure, lost[1], fix, code="server.cluster") from None

    @classmethod
    def state(cls) -> dict[str, Any]:
        """Return the part's state; if another node ended the part, `why` names that node."""
        state = super().state()
        if state["state"] == "ended" and (lost := loss(cls.log())):
            state |= {"why": f"node {lost[0]}: {lost[1]}", "asked": lost[1] == watch.STOPPED}
        return state


def answer(request: NodeRequest) -> dict[str, Any]:
    """Run the requested action. Raises the errors of the part."""
    config = request.config
    part: type[EmbeddedNode | ContainerNode] = ContainerNode if config.in_containers else EmbeddedNode
    match request.action:
        case "validate":
            launch.refuse_second()  # the cleanup after a failed start would also end a server that runs already
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
            carried = {"transport": transport(device.log())[1]} if config.has_gpus else {}
            return {"url": server.url, "model": server.model_id, "proof": server.proof, **carried}
        case "status":
            return part.state()
        case "logs":
            return {"lines": part.log().splitlines()[-request.lines :]}
        case _:  # down
            return {"state": part.stop()}


def main() -> int:
    """Read the request from stdin and print the answer, also for an error; return the exit code, 0."""
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


PYTHON = "/opt/venv/bin/python"  # of the image
# Prints the container's problems with RDMA; it runs as the user of vLLM.
RDMA_PROBE = """\
import glob, os, resource
devices, (locked, _) = glob.glob("/dev/infiniband/uverbs*"), resource.getrlimit(resource.RLIMIT_MEMLOCK)
if not devices:
    print("there is no /dev/infiniband/uverbs*, so NCCL would use TCP")
elif not any(os.access(device, os.R_OK | os.W_OK) for device in devices):
    print("its user may not open /dev/infiniband/uverbs*")
if locked != resource.RLIM_INFINITY:
    print(f"it may lock {locked} bytes of memory only")
"""
KEPT_LOG = "logs/cluster.container.log"  # of a container that is removed, in SPARKFORGE_STATE


class ContainerNode(Container):
    """A node's part in a container. Variables for Compose carry the node's role, model, flags and watched nodes."""

    def __init__(self, config: ClusterConfig, node: ClusterNode, token: str = "") -> None:
        super().__init__(_plan(config, node), lambda *_: None)  # `prepare`, which builds images, does nothing
        self.config, self.node = config, node
        watching = json.dumps(config.watch_options(node))
        self.env |= {**node.variables, entrypoint.CLUSTER: watching, watch.TOKEN: token}
        further = () if config.has_gpus else (docker_compose.CLUSTER_CPU,)
        self.compose_files = (docker_compose.CLUSTER, *further)

    def prepare(self) -> None:
        """Do nothing: `cluster.check` found the same image on every node."""

    def validate(self) -> str:
        """Validate this node's part in its container, and the container's access to RDMA. Raises RefusalError."""
        once: list[str | Path] = ["run", "--rm", "--no-deps", "--no-TTY"]
        if self.config.has_gpus:
            look = docker_compose.compose(
                *once, "--entrypoint", PYTHON, SERVICE, "-c", RDMA_PROBE, more=self.compose_files
            )
            if problems := "; ".join(docker(look, env=self.env).splitlines())[:300]:
                fix = "ls -l /dev/infiniband on the node; docker-compose.cluster.yml mounts it with unlimited memlock"
                failure = f"the container of {self.node.name} has no RDMA"
                raise RefusalError(failure, problems, fix, code="validation.cluster")
        log = paths.state() / "logs" / "cluster.validate.log"
        command = docker_compose.compose(*once, SERVICE, "validate", more=self.compose_files)
        try:
            docker_logged(command, log, lambda _: None, self.env)
        except EngineError as error:
            if error.code != "engine.failed":
                raise
            problem = f"{self.node.name}: the validator refuses"
            raise logs.refusal(problem, logs.read(log), why=error.why, fix=on("less", log)) from error
        return "serve"

    def begin(self) -> None:
        """Start a worker's container and return at once. Raises Compose's errors; `cluster.up` then ends the worker."""
        paths.secure_state()
        write_atomic(record.begun_path(), f"{docker_compose.project()}\n")  # read by `launch.down`
        started = time.time()
        docker_compose.up(self.env, paths.state() / "logs" / "compose.log", lambda _: None, more=self.compose_files)
        model, config = self.env.get("SPARKFORGE_MODEL", ""), self.config
        served = (LOOPBACK, config.port, model, "a worker's part", config.device)
        record.write(Server(0, started, *served, "", identity(), profile=config.profile))
        record.begun_path().unlink(missing_ok=True)

    def start(self) -> Server:
        """Start the head's container. Raises ServerError if NCCL uses TCP instead of RDMA."""
        project = docker_compose.resolved(self.env, self.compose_files)
        self.service = docker_compose.service_of(project, self.config.port)
        if self.service.key_file:
            access.read_key(Path(self.service.key_file), private=False)
        server = self.serve(lambda _: None)
        tcp, carried = transport(self.log()) if self.config.has_gpus else (0, "")
        if tcp:
            keep_log()
            launch.stop()  # `launch.down` would also end this process, because it holds the start's lock
            fix = "./inv cluster.check; ./inv cluster.logs shows why"
            raise ServerError("NCCL took TCP in place of RDMA", carried, fix, code="server.cluster")
        return server

    @classmethod
    def stop(cls) -> str:
        """Stop and remove this node's container; without one, end the recorded server."""
        keep_log()
        stopped = super().stop()  # removes the record's container
        if not identity():
            return stopped
        docker_compose.down({})
        record.begun_path().unlink(missing_ok=True)
        record.forget()
        return "stopped the container"

    @classmethod
    def log(cls) -> str:
        """Return the container's output, or the saved output of the last one."""
        return last_log() if identity() else logs.read(paths.state() / KEPT_LOG)

    @classmethod
    def state(cls) -> dict[str, Any]:
        """Return the container's state, and if it has ended, the reason and whether the end was requested."""
        container = identity()
        with engine.connected() as client:
            state = engine.state(client, container) if container else None
        if state is None:
            return {"state": "stopped"}
        if state.status == "running":
            milestone = "" if state.health == "healthy" else logs.milestone(last_log())
            return {"state": "running", "container": container[:12], "milestone": milestone or state.health}
        if state.status not in ("exited", "dead"):  # such as created, paused or restarting
            return {"state": state.status, "why": f"the container is {state.status}"}
        lost = loss(last_log())
        why = f"node {lost[0]}: {lost[1]}" if lost else f"the container ended with code {state.exit_code}"
        asked = lost[1] == watch.STOPPED if lost else state.exit_code in record.CLEAN_EXITS
        return {"state": "ended", "why": why, "asked": asked, "left": 0}


def identity() -> str:
    """Return the id of this checkout's container, running or not; empty for none."""
    with engine.connected() as client:
        return engine.service_container(client, docker_compose.project(), SERVICE) or ""


def keep_log() -> None:
    """Save the container's output before it is removed, because the error of a failed start names the saved file."""
    with suppress(EngineError):
        if text := last_log():
            write_atomic(paths.state() / KEPT_LOG, text)


# NCCL with NCCL_DEBUG=INFO: "Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/1", and a plugin's name in place of IB.
CHANNEL = re.compile(
    r"NCCL INFO Channel \S+ : \S+ -> \S+ \[(?:send|receive)\] via NET/(?P<kind>[A-Za-z]+)\w*/(?P<device>\d+)"
)


def transport(log: str) -> tuple[int, str]:
    """Return the number of channels between nodes that use TCP in NCCL's log, and a sentence about all channels."""
    channels = [(match["kind"], match["device"]) for match in CHANNEL.finditer(log)]
    devices = [device for kind, device in channels if kind.startswith("IB")]
    if tcp := len(channels) - len(devices):
        return tcp, f"TCP carries {tcp} of {len(channels)} channels"
    return 0, f"RDMA carries all {len(devices)} channels, over {len(set(devices))} devices" if devices else "not known"


if __name__ == "__main__":
    sys.exit(main())
