"""Our Compose project: its files, the resolved project of a stack, up and down."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sparkforge.core import paths
from sparkforge.core.docker import docker, docker_logged
from sparkforge.core.errors import EngineError, UsageError
from sparkforge.core.files import DocumentError
from sparkforge.core.tables import parse_object

PROJECT, SERVICE = "sparkforge", "vllm"
FILE = "docker-compose.yml"  # its service extends the service of deploy/stacks.yml that STACK names
STACK = "SPARKFORGE_STACK"
CLUSTER = "docker-compose.cluster.yml"  # after the other files: one node of a model over several machines
CLUSTER_CPU = "docker-compose.cluster.cpu.yml"  # after CLUSTER: a node without RDMA and GPU
OVERRIDE = "docker-compose.override.yml"  # Compose reads it by default only if no file is named
CACHE = "cache"  # the Compose volume with compiled code
KEY = "api_key"  # the Compose secret with the server's API key
KEY_VARIABLE = "SPARKFORGE_API_KEY"  # names the key's file
EXTRA_FILES = "SPARKFORGE_COMPOSE_FILES"


class Project(BaseModel):
    """The fields of a resolved project that we read, except its service (`service_of`)."""

    services: dict[str, dict[str, Any] | None] | None = None
    volumes: dict[str, dict[str, Any] | None] | None = None
    secrets: dict[str, dict[str, Any] | None] | None = None


@dataclass(frozen=True)
class Service:
    """The vllm service as Compose resolves it: image, stack, published port, GPUs, and the container's variables."""

    image: str
    stack: str
    host: str
    port: int
    gpus: int
    environment: Mapping[str, str]
    key_file: str


def project() -> str:
    """Return the Compose project's name."""
    return os.environ.get("COMPOSE_PROJECT_NAME") or PROJECT


def files() -> list[Path]:
    """Return the Compose files, the user's own last. Raises UsageError if one is missing."""
    own = [name for name in os.environ.get(EXTRA_FILES, "").split(os.pathsep) if name]
    override = [OVERRIDE] if (paths.ROOT / OVERRIDE).exists() else []
    chosen = [paths.ROOT / name for name in (FILE, *override, *own)]
    if missing := [path for path in chosen if not path.is_file()]:
        raise UsageError(f"there is no {missing[0]}", "Compose needs it", f"git status   # or look at {EXTRA_FILES}")
    return chosen


def compose(*arguments: str | Path, more: Sequence[str] = ()) -> list[str | Path]:
    """Return the arguments of `docker` for a Compose command on our files, the user's, and the checkout's `more`."""
    chosen = [*files(), *(paths.ROOT / name for name in more)]
    file_options: list[str | Path] = [option for path in chosen for option in ("--file", path)]
    return ["compose", "--project-name", project(), "--project-directory", paths.ROOT, *file_options, *arguments]


def typed(*arguments: str) -> str:
    """Return the Compose command that a person can run, with the project and the files that `./inv` uses."""
    return shlex.join(["docker", *map(str, compose(*arguments))])


def _named(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env`, with our files in COMPOSE_FILE if there are more than Compose finds by default.

    Compose itself reads the files after `--file`; the container's errors name those of COMPOSE_FILE.
    """
    more = {"COMPOSE_FILE": os.pathsep.join(map(str, files()))} if os.environ.get(EXTRA_FILES) else {}
    return {**env, **more}


def variables(stack: str) -> dict[str, str]:
    """Return the variable that selects a stack in the Compose files; without it Compose uses `.env` or a default."""
    return {STACK: stack} if stack else {}


def resolve(env: Mapping[str, str]) -> Service:
    """Return the service as Compose resolves it. Raises EngineError without Compose or for a broken file."""
    return service_of(resolved(env))


def resolved(env: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, Any]:
    """Return the project as Compose resolves it, with the checkout's files `more` after ours. Raises EngineError."""
    text = docker(compose("config", "--format", "json", more=more), env=env if more else _named(env))
    try:
        return parse_object(text, "Compose's project", Project)
    except DocumentError as error:
        raise EngineError("Compose resolves no project", error.why, typed("config"), code="engine.failed") from error


def service_of(document: Mapping[str, Any], port: int = 0) -> Service:
    """Return the service in a resolved project. Raises EngineError if it is incomplete.

    `port` is the server's port if the service uses the host's network, where Compose publishes none.
    """
    try:
        service = document["services"][SERVICE]
        published = {"published": port} if port else service["ports"][0]
        variables = (service.get("environment") or {}).items()
        environment = {name: str(value) for name, value in variables if value is not None}  # null: not set
        resources = (service.get("deploy") or {}).get("resources") or {}
        key_file = str(((document.get("secrets") or {}).get(KEY) or {}).get("file") or "")
        return Service(
            image=str(service["image"]),
            stack=environment[STACK],
            host=str(published.get("host_ip") or "127.0.0.1"),
            port=int(published["published"]),
            gpus=len((resources.get("reservations") or {}).get("devices") or []),
            environment=environment,
            key_file="" if key_file == os.devnull else key_file,  # our files name /dev/null for no key
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        failure = f"Compose resolves no usable service {SERVICE}"
        raise EngineError(failure, why, typed("config"), code="engine.failed") from error


def up(env: Mapping[str, str], log: Path, tell: Callable[[str], None], *, more: Sequence[str] = ()) -> None:
    """Create and start the service's container from its image; output goes to `log`. `more` are further files."""
    arguments = compose("up", "--detach", "--no-build", SERVICE, more=more)
    docker_logged(arguments, log, tell, env if more else _named(env))


def stop(env: Mapping[str, str]) -> None:
    """Stop the service's container within its grace period, and keep it so that its log can be read."""
    docker(compose("stop", SERVICE), env=env)


def down(env: Mapping[str, str]) -> None:
    """Stop and remove the project's containers and networks, including those of every profile, but not its volumes."""
    docker(compose("--profile", "*", "down"), env=env)
