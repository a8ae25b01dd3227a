"""Our Compose project: which files make a device, what Compose resolves them to, up and down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serve.device import DOCKER, DOCKER_CPU
from sparkforge import paths
from sparkforge.docker_cli import docker, docker_logged
from sparkforge.errors import EngineError, UsageError

PROJECT, SERVICE = "sparkforge", "vllm"
FILES = {DOCKER: ("docker-compose.yml",), DOCKER_CPU: ("docker-compose.yml", "docker-compose.cpu.yml")}
OVERRIDE = "docker-compose.override.yml"  # Compose reads it by itself only where no file is named
KEY = "api_key"  # the Compose secret with the server's API key
MORE = "SPARKFORGE_COMPOSE_FILES"


@dataclass(frozen=True)
class Service:
    """What Compose makes of our files for one device: the image, the published port, and the container's variables."""

    image: str
    host: str
    port: int
    environment: Mapping[str, str]
    key_file: str

    @property
    def cpu(self) -> bool:
        """Whether it serves without a GPU."""
        return self.environment.get("SPARKFORGE_PROFILE") == "embedded"


def project() -> str:
    """Return the Compose project's name."""
    return os.environ.get("COMPOSE_PROJECT_NAME") or PROJECT


def files(device: str) -> list[Path]:
    """Return a device's Compose files, the user's own ones last. Raises UsageError if one is not there."""
    if device not in FILES:
        raise UsageError(f"--device {device!r} is no container", f"there are {', '.join(FILES)}", f"--device {DOCKER}")
    own = [name for name in os.environ.get(MORE, "").split(os.pathsep) if name]
    override = [OVERRIDE] if (paths.ROOT / OVERRIDE).exists() else []
    chosen = [paths.ROOT / name for name in (*FILES[device], *override, *own)]
    if missing := [path for path in chosen if not path.is_file()]:
        raise UsageError(f"there is no {missing[0]}", f"{device} needs it", f"git status   # or look at {MORE}")
    return chosen


def compose(device: str, *words: str | Path) -> list[str | Path]:
    """Return the words behind `docker` for a Compose command on a device."""
    named: list[str | Path] = [word for file in files(device) for word in ("--file", file)]
    return ["compose", "--project-name", project(), "--project-directory", paths.ROOT, *named, *words]


def resolve(device: str, env: Mapping[str, str]) -> Service:
    """Return what Compose makes of the files. Raises EngineToolError without Compose, EngineError for a broken file."""
    text = docker(compose(device, "config", "--format", "json"), env=env)
    try:
        document = json.loads(text)
        service = document["services"][SERVICE]
        published = service["ports"][0]
        return Service(
            image=str(service["image"]),
            host=str(published.get("host_ip") or "127.0.0.1"),
            port=int(published["published"]),
            environment={name: str(value) for name, value in (service.get("environment") or {}).items()},
            key_file=str(((document.get("secrets") or {}).get(KEY) or {}).get("file") or ""),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise EngineError(f"Compose resolves no usable service {SERVICE}", why, "docker compose config") from error


def up(device: str, env: Mapping[str, str], log: Path, tell: Callable[[str], None]) -> None:
    """Create and start the service's container; the image must be there. Output goes to `log`."""
    docker_logged(compose(device, "up", "--detach", "--no-build", SERVICE), log, tell, env)


def stop(device: str, env: Mapping[str, str]) -> None:
    """Stop the service's container within its grace period; it stays, so that its log can be read."""
    docker(compose(device, "stop", SERVICE), env=env)


def down(device: str, env: Mapping[str, str]) -> None:
    """Stop and remove the project's containers and networks, not its volumes."""
    docker(compose(device, "down"), env=env)


def inside(device: str, command: Sequence[str]) -> list[str | Path]:
    """Return the words behind `docker` that run a command inside the service's running container."""
    return compose(device, "exec", SERVICE, *command)
