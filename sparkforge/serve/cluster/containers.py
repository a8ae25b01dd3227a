"""A node's part of a cluster in a container, on `docker` and `docker-cpu`.

Compose reads the files of a single machine, then docker-compose.cluster.yml, and without GPUs then
docker-compose.cluster.cpu.yml. Not verified on a DGX Spark.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.core import paths
from sparkforge.core.advice import on
from sparkforge.core.console import Steps
from sparkforge.core.docker import docker, docker_logged
from sparkforge.core.errors import EngineError, RefusalError, ServerError
from sparkforge.core.files import write_atomic
from sparkforge.core.tables import Record, parse_record
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine
from sparkforge.image.compose import SERVICE
from sparkforge.serve import access, entrypoint, launch, logs, record
from sparkforge.serve.cluster import watch
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.devices.container import Container, last_log
from sparkforge.serve.plan import LOOPBACK, StartPlan
from sparkforge.serve.record import Server

PYTHON = "/opt/venv/bin/python"  # of the image
# Prints the container's RDMA devices and limits, as the user that will run vLLM.
RDMA_PROBE = (
    "import json,os,resource as r; d='/dev/infiniband'; "
    "n=sorted(os.listdir(d)) if os.path.isdir(d) else []; "
    "print(json.dumps({'devices': n, 'open': [i for i in n if os.access(d+'/'+i, os.R_OK|os.W_OK)], "
    "'memlock': r.getrlimit(r.RLIMIT_MEMLOCK)[0]}))"
)
UNLIMITED = -1
ENDED_STATES = ("exited", "dead")


class ContainerRdma(Record):
    """A container's access to RDMA, as RDMA_PROBE prints it: files in /dev/infiniband, and bytes that it may lock."""

    devices: tuple[str, ...]
    open: tuple[str, ...]
    memlock: int

    def problems(self) -> Iterator[str]:
        """Yield the problems."""
        if not any(name.startswith("uverbs") for name in self.devices):
            yield "there is no /dev/infiniband/uverbs*, so NCCL would take TCP"
        elif not any(name.startswith("uverbs") for name in self.open):
            yield "its user may not open /dev/infiniband/uverbs*"
        if self.memlock != UNLIMITED:
            yield f"it may lock {self.memlock} bytes of memory only"


def _refuse_build(stack: str, _steps: Steps) -> None:
    raise EngineError(
        "a node builds no image", f"{stack} is missing", "./inv cluster.sync --image", code="engine.image"
    )


class ContainerNode(Container):
    """A node's part in a container; Compose reads this node's role, model, flags and watched nodes."""

    def __init__(self, config: ClusterConfig, node: ClusterNode, token: str = "") -> None:
        is_head = node == config.head
        port = (f"--port={config.port}",) if is_head else ()
        plan = StartPlan(
            config.device,
            model=config.model,
            profile=config.profile,
            stack=config.stack,
            port=config.port,
            key_file=(config.key_file or None) if is_head else None,  # a worker answers no client
            flags=(*config.engine_flags(node), *port, *config.flags),
        )
        super().__init__(plan, _refuse_build)
        self.config, self.node = config, node
        watching = json.dumps(config.watch_options(node))
        self.env |= {**node.variables, entrypoint.CLUSTER: watching, watch.TOKEN: token}
        further = () if config.has_gpus else (docker_compose.CLUSTER_CPU,)
        self.compose_files = (docker_compose.CLUSTER, *further)

    def prepare(self) -> None:
        """Do nothing: `cluster.check` has found the same image on every node."""

    def validate(self) -> str:
        """Validate this node's part in its container, and the container's access to RDMA."""
        once: list[str | Path] = ["run", "--rm", "--no-deps", "--no-TTY"]
        if self.config.has_gpus:
            look = docker_compose.compose(
                *once, "--entrypoint", PYTHON, SERVICE, "-c", RDMA_PROBE, more=self.compose_files
            )
            origin = f"the answer of the container of {self.node.name}"
            inside = parse_record(docker(look, env=self.env), origin, ContainerRdma)
            if problems := "; ".join(inside.problems()):
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
        """Start a worker's container and return at once. Raises what Compose raises; `cluster.up` ends it then."""
        paths.secure_state()
        write_atomic(record.begun_path(), f"{docker_compose.project()}\n")  # what `launch.down` ends
        started = time.time()
        docker_compose.up(self.env, paths.state() / "logs" / "compose.log", lambda _: None, more=self.compose_files)
        server = Server(
            pid=0,
            started=started,
            host=LOOPBACK,
            port=self.config.port,
            model=self.env.get("SPARKFORGE_MODEL", ""),
            model_id="a worker's part",
            device=self.config.device,
            log="",
            container=identity(),
            profile=self.config.profile,
        )
        record.write(server)
        record.begun_path().unlink(missing_ok=True)

    def start(self) -> Server:
        """Start the head's container. Raises ServerError if NCCL took TCP in place of RDMA."""
        project = docker_compose.resolved(self.env, self.compose_files)
        self.service = docker_compose.service_of(project, self.config.port)
        if self.service.key_file:
            access.read_key(Path(self.service.key_file), private=False)
        server = self.serve(lambda _: None)
        if self.config.has_gpus and (carried := transport(self.log())).tcp:
            keep_log()
            launch.stop()  # not `down`, which would end the holder of the start's lock: this process
            fix = "./inv cluster.check; ./inv cluster.logs shows why"
            raise ServerError("NCCL took TCP in place of RDMA", carried.description, fix, code="server.cluster")
        return server

    @classmethod
    def stop(cls) -> str:
        """Stop and remove this node's container; without one, end the recorded server."""
        keep_log()
        stopped = super().stop()  # removes the record's container
        if not identity():
            return stopped
        keep_log()
        docker_compose.down({})
        record.begun_path().unlink(missing_ok=True)
        record.forget()
        return "stopped the container"

    @classmethod
    def log(cls) -> str:
        """Return the container's output, or the saved output of the last one."""
        return last_log() if identity() else logs.read(_kept_log())

    @classmethod
    def state(cls) -> dict[str, Any]:
        """Say whether the container runs, and if it has ended, how, and whether somebody asked for it."""
        container = identity()
        with engine.connected() as client:
            state = engine.state(client, container) if container else None
        if state is None:
            return {"state": "stopped"}
        if state.status == "running":
            milestone = "" if state.health == "healthy" else logs.milestone(last_log())
            return {"state": "running", "container": container[:12], "milestone": milestone or state.health}
        if state.status not in ENDED_STATES:  # such as created, paused or restarting
            return {"state": state.status, "why": f"the container is {state.status}"}
        ended = re.findall(r"^✗ (node \S+) ended this node's part.*\n\s*why:\s*(.*)$", last_log(), re.MULTILINE)
        why = ": ".join(ended[-1]) if ended else f"the container ended with code {state.exit_code}"
        asked = why.endswith(watch.STOPPED) if ended else state.exit_code in record.CLEAN_EXITS
        return {"state": "ended", "why": why, "asked": asked, "left": 0}


def identity() -> str:
    """Return the id of this checkout's container, running or not; empty for none."""
    with engine.connected() as client:
        return engine.service_container(client, docker_compose.project(), SERVICE) or ""


def _kept_log() -> Path:
    return paths.state() / "logs" / "cluster.container.log"


def keep_log() -> None:
    """Save the container's output before it is removed: the error of a failed start names that file."""
    with suppress(EngineError):
        if text := last_log():
            write_atomic(_kept_log(), text)


# NCCL with NCCL_DEBUG=INFO: "Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/1", and a plugin's name in place of IB.
CHANNEL = re.compile(
    r"NCCL INFO Channel \S+ : \S+ -> \S+ \[(?:send|receive)\] via NET/(?P<kind>[A-Za-z]+)\w*/(?P<device>\d+)"
)


@dataclass(frozen=True)
class Transport:
    """The channels between nodes in NCCL's log: how many use RDMA devices, and how many use TCP."""

    rdma: int
    devices: tuple[int, ...]
    tcp: int

    @property
    def description(self) -> str:
        """One line for people."""
        if self.tcp:
            return f"TCP carries {self.tcp} of {self.tcp + self.rdma} channels"
        return f"RDMA carries all {self.rdma} channels, over {len(self.devices)} devices" if self.rdma else "not known"


def transport(log: str) -> Transport:
    """Read NCCL's channels between nodes from a log; those within a node are not counted."""
    channels = [(match["kind"], int(match["device"])) for match in CHANNEL.finditer(log)]
    rdma = [device for kind, device in channels if kind.startswith("IB")]
    return Transport(len(rdma), tuple(sorted(set(rdma))), len(channels) - len(rdma))
