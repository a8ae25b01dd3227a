"""A node's part of a cluster in a container: what node.py does on `docker` and `docker-cpu`, on that node.

Compose starts it from the files of one machine, docker-compose.cluster.yml behind them, and without GPUs
docker-compose.cluster.cpu.yml behind that. Each function takes the
cluster's configuration and the node, as on the embedded device. Not verified on a DGX Spark.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkforge.core import console, paths
from sparkforge.core.docker import docker, docker_logged
from sparkforge.core.documents import parse_json
from sparkforge.core.errors import EngineError, RefusalError, ServerError
from sparkforge.core.files import write_atomic
from sparkforge.image import compose as docker_compose
from sparkforge.image.compose import SERVICE
from sparkforge.serve import container, entrypoint, launch, logs, record
from sparkforge.serve.cluster import watch
from sparkforge.serve.cluster.channels import transport
from sparkforge.serve.cluster.config import ClusterConfig, ClusterNode
from sparkforge.serve.plan import LOOPBACK, StartPlan
from sparkforge.serve.record import Server

PYTHON = "/opt/venv/bin/python"  # of the image
# What the container has of RDMA, by the user and with the limits with which vLLM will run.
INSIDE = (
    "import json,os,resource as r; d='/dev/infiniband'; "
    "n=sorted(os.listdir(d)) if os.path.isdir(d) else []; "
    "print(json.dumps({'devices': n, 'open': [i for i in n if os.access(d+'/'+i, os.R_OK|os.W_OK)], "
    "'memlock': r.getrlimit(r.RLIMIT_MEMLOCK)[0]}))"
)
UNLIMITED = -1
# A container's codes after an end that somebody asked for, as supervise.py gives them.
ASKED = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
DEAD = ("exited", "dead")
NAMED = (docker_compose.CLUSTER,)  # for commands on a container that is there, which read nothing else of the files


def files(config: ClusterConfig) -> tuple[str, ...]:
    """Return the Compose files of a node, behind those of one machine."""
    more = () if config.has_gpus else (docker_compose.CLUSTER_CPU,)
    return (docker_compose.CLUSTER, *more)


def variables(config: ClusterConfig, node: ClusterNode, token: str = "") -> dict[str, str]:
    """Return what the Compose files read: this node's role, model, flags, and whom it watches.

    Raises what `container.variables` raises.
    """
    is_head = node == config.head
    key_file = (config.key_file or None) if is_head else None  # a worker answers no client
    flags = (*config.engine_flags(node), *((f"--port={config.port}",) if is_head else ()), *config.flags)
    watching = watch.watch_options(
        node=node.name,
        address=config.head.address,
        port=config.watch_port,
        peers=[worker.name for worker in config.workers] if is_head else [config.head.name],
        listen=is_head,
    )
    plan = StartPlan(
        config.device,
        model=config.model,
        profile=config.profile,
        stack=config.stack,
        port=config.port,
        key_file=key_file,
        flags=flags,
    )
    return {
        **container.variables(plan),
        **node.variables,
        entrypoint.CLUSTER: json.dumps(watching),
        watch.TOKEN: token,
    }


def validate(config: ClusterConfig, node: ClusterNode) -> dict[str, Any]:
    """Validate this node's part in its container, and what that container has of RDMA.

    Raises RefusalError; ServerError if a server of this checkout runs; EngineError.
    """
    launch.refuse_second()
    env = variables(config, node)
    once: list[str | Path] = ["run", "--rm", "--no-deps", "--no-TTY"]
    if config.has_gpus:
        look = docker_compose.compose(*once, "--entrypoint", PYTHON, SERVICE, "-c", INSIDE, more=files(config))
        problems = rdma_problems(parse_json(docker(look, env=env), f"what the container of {node.name} says"))
        if problems:
            fix = "ls -l /dev/infiniband on the node; docker-compose.cluster.yml passes it on, with memlock unlimited"
            why = "; ".join(problems)
            raise RefusalError(f"the container of {node.name} has no RDMA", why, fix, code="validation.cluster")
    log = paths.state() / "logs" / "cluster.validate.log"
    try:
        docker_logged(docker_compose.compose(*once, SERVICE, "validate", more=files(config)), log, lambda _: None, env)
    except EngineError as error:
        if error.code != "engine.failed":
            raise
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        failures = [line for line in lines if line.startswith("FAIL ")]
        why = "; ".join(failures) or error.why
        fix = next((line.removeprefix("next:").strip() for line in lines if line.startswith("next:")), f"less {log}")
        raise RefusalError(f"{node.name}: the validator refuses", why, fix, code="validation.failed") from error
    return {"verdict": "serve"}


def rdma_problems(inside: Mapping[str, Any]) -> list[str]:
    """Return what a container lacks for RDMA, from what INSIDE printed in it."""
    problems = []
    if not any(name.startswith("uverbs") for name in inside["devices"]):
        problems.append("there is no /dev/infiniband/uverbs*, so NCCL would take TCP")
    elif not any(name.startswith("uverbs") for name in inside["open"]):
        problems.append("its user may not open /dev/infiniband/uverbs*")
    if inside["memlock"] != UNLIMITED:
        problems.append(f"it may lock {inside['memlock']} bytes of memory only")
    return problems


def begin(config: ClusterConfig, node: ClusterNode, token: str) -> dict[str, Any]:
    """Start a worker's container and return at once. Raises what Compose raises; `cluster.up` ends it then."""
    paths.secure_state()
    write_atomic(record.begun_path(), f"{docker_compose.project()}\n")  # what `launch.down` ends
    log = paths.state() / "logs" / "compose.log"
    env, started = variables(config, node, token), time.time()
    docker_compose.up(env, log, lambda _: None, more=files(config))
    server = Server(
        pid=0,
        started=started,
        host=LOOPBACK,
        port=config.port,
        model=env.get("SPARKFORGE_MODEL", ""),
        model_id="a worker's part",
        device=config.device,
        log="",
        container=identity(),
        profile=config.profile,
    )
    record.write(server)
    record.begun_path().unlink(missing_ok=True)
    return {"container": server.container}


def start(config: ClusterConfig, node: ClusterNode, token: str) -> dict[str, Any]:
    """Start the head's container and wait for its first answers; raises ServerError if NCCL took TCP in place of RDMA.

    Raises what `container.start_part` raises; whenever it raises, the container is stopped.
    """
    env = variables(config, node, token)
    document = parse_json(
        docker(docker_compose.compose("config", "--format", "json", more=files(config)), env=env), "Compose"
    )
    server = container.start_part(config.device, env, document, LOOPBACK, config.port, files(config))
    answer = {"url": server.url, "model": server.model_id, "proof": server.proof}
    if not config.has_gpus:
        return answer
    carried = transport(log_text())
    if carried.tcp:
        keep_log()
        launch.stop()  # not `down`: this process has the lock of a start, and would ask itself to end
        fix = "./inv cluster.check; ./inv cluster.logs shows why"
        raise ServerError("NCCL took TCP in place of RDMA", carried.description, fix, code="server.cluster")
    return {**answer, "transport": carried.description}


def identity() -> str:
    """Return the id of this checkout's container, running or not; empty for none."""
    return docker(docker_compose.compose("ps", "--all", "--quiet", SERVICE, more=NAMED)).strip()


def log_text() -> str:
    """Return what the container printed; empty if there is none."""
    # Compose 2.26 puts "erase the line" (ESC [2K) before each line, also where --no-color is asked for.
    return console.safe(docker(docker_compose.compose("logs", "--no-color", "--no-log-prefix", SERVICE, more=NAMED)))


def status() -> dict[str, Any]:
    """Say whether this node's container runs, and if it has ended, how, and whether somebody asked for it."""
    text = docker(docker_compose.compose("ps", "--all", "--format", "json", SERVICE, more=NAMED)).strip()
    if not text:
        return {"state": "stopped"}
    entry = parse_json(text.splitlines()[0], "docker compose ps")
    if entry["State"] == "running":
        milestone = "" if entry.get("Health") == "healthy" else logs.milestone(log_text())
        return {"state": "running", "container": entry["ID"][:12], "milestone": milestone or entry.get("Health", "")}
    if entry["State"] not in DEAD:  # such as created, paused or restarting
        return {"state": entry["State"], "why": f"the container is {entry['State']}"}
    ended = re.findall(r"^✗ (node \S+) ended this node's part.*\n\s*why:\s*(.*)$", log_text(), re.MULTILINE)
    why = ": ".join(ended[-1]) if ended else f"the container ended with code {entry.get('ExitCode')}"
    asked = why.endswith(watch.STOPPED) if ended else entry.get("ExitCode") in ASKED
    return {"state": "ended", "why": why, "asked": asked, "left": 0}


def tail(lines: int) -> dict[str, Any]:
    """Return the last lines of the container's log, or of the log that was kept of the last one."""
    text = log_text() if identity() else logs.read(_kept_log())
    return {"lines": text.splitlines()[-lines:]}


def _kept_log() -> Path:
    return paths.state() / "logs" / "cluster.container.log"


def keep_log() -> None:
    """Write down what the container printed before it is removed: advice after a failed start names its log."""
    with suppress(EngineError):
        if text := log_text():
            write_atomic(_kept_log(), text)


def down() -> dict[str, Any]:
    """Stop and remove this node's container."""
    keep_log()
    docker(docker_compose.compose("down", more=NAMED))
    record.begun_path().unlink(missing_ok=True)
    record.forget()
    return {"state": "stopped the container"}
