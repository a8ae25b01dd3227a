"""The one way in which Sparkforge runs the `docker` command, and what its complaints and the engine's mean."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.advice import on
from sparkforge.core.errors import EngineError, SparkforgeError, StorageError
from sparkforge.core.process import TAIL_LINES, Child, run_unchecked

INSTALL = "sudo apt install docker.io   # or Docker Engine: https://docs.docker.com/engine/install"
POLL_SECONDS = 0.2
LOG_END = 8192  # characters of a build's log that show how it ended; programs may print anything before
# BuildKit's plain progress: "#12 [runtime 3/5] RUN …", and what a step prints: "#12 4.21 text".
_REGISTRY = re.compile(r"https?://([^/\s\"]+)/v2/")  # in a message; takes the place of HOST in a fix
_BUILD_STEP = re.compile(r"^#\d+ (\[[^\]]+\] .{0,60})", re.MULTILINE)


# Messages of moby, docker/cli, buildx, compose and the NVIDIA container toolkit: the pattern of a line, and the error's
# code, first part and fix. The first that matches counts.
COMPLAINTS = (
    (
        r"failed to resolve source metadata for",
        "engine.base",
        "the base image cannot be pulled",
        "again   # first check the network, or docker login to the registry of that image",
    ),
    (
        r"no basic auth credentials|authentication required|requested access to the resource is denied",
        "engine.registry",
        "the registry wants a login",
        "docker login HOST   # then the same command again",
    ),
    (
        r"server gave HTTP response to HTTPS client",
        "engine.registry",
        "the registry speaks plain HTTP, which docker accepts on the loopback address only",
        "again   # first give it TLS; or name it in insecure-registries of /etc/docker/daemon.json",
    ),
    (
        r"x509: |failed to verify certificate",
        "engine.registry",
        "the registry's certificate is not trusted",
        "again   # first put the certificate of its authority into /etc/docker/certs.d/HOST/ca.crt",
    ),
    # A build's base has the same words, on another line, and a fix of its own above.
    (
        r'(?:get|head|post|put|patch) "?https?://[^"\s]+/v2/',
        "engine.registry",
        "the registry cannot be reached",
        "again   # first check its name and the network",
    ),
    (
        r"permission denied while trying to connect|connect: permission denied",
        "engine.permission",
        "no permission to use the Docker engine",
        "sudo usermod -aG docker $USER   # then log out and in",
    ),
    (
        (
            r"cannot connect to the docker daemon|failed to connect to the docker api|is the docker daemon running"
            r"|connect: connection refused|connect: no such file or directory"
        ),
        "engine.down",
        "the Docker engine does not run",
        "sudo systemctl start docker",
    ),
    (
        (
            r"'buildx' is not a docker command|buildx component is missing|unknown command: docker buildx"
            r"|unknown flag: --(?:builder|load|build-context|metadata-file)"
        ),
        "engine.tool",
        "docker buildx is missing or too old",
        "sudo apt install docker-buildx-plugin   # Debian's own package: docker-buildx",
    ),
    (
        r"exporter is not supported for the docker driver",
        "engine.store",
        "the Docker engine's image store cannot hold an image as a registry does",
        """{"features": {"containerd-snapshotter": true}} in /etc/docker/daemon.json, sudo systemctl restart docker""",
    ),
    (
        (
            r"'compose' is not a docker command|unknown command: docker compose|unknown shorthand flag: '[fp]' in -[fp]"
            r"|unknown flag: --(?:project-name|project-directory)"
        ),
        "engine.tool",
        "docker compose is missing or too old",
        "sudo apt install docker-compose-plugin   # Debian's own package: docker-compose",
    ),
    (
        (
            r"could not select device driver|unknown or invalid runtime name: nvidia|unresolvable cdi devices"
            r"|nvidia-container-(?:cli|runtime)"
        ),
        "engine.gpu",
        "the Docker engine cannot give a container the GPU",
        "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
    ),
    (
        r"port is already allocated|failed to bind host port|bind: address already in use",
        "server.port",
        "the port is taken",
        "docker ps   # who has it; or choose another: ./inv up --port 8001",
    ),
    (
        (
            r"no matching manifest for|does not match the (?:specified|detected host) platform|exec format error"
            r"|does not provide the specified platform|image operating system .* cannot be used"
        ),
        "integrity.image",
        "the image is for another platform",
        "./inv build --engine docker   # builds it for this machine",
    ),
    (
        (
            r"no such image|pull access denied|manifest unknown|repository does not exist|image not found"
            r"|failed to resolve reference"
        ),
        "engine.image",
        "an image is not on this machine and cannot be pulled",
        "./inv build --engine docker   # or check the network if it is a base image",
    ),
)
NO_SPACE = re.compile(r"^.*(?:no space left on device|disk quota exceeded).*$", re.IGNORECASE | re.MULTILINE)
PRUNE = "docker system df && docker builder prune   # build cache is the first thing to go"


def explained(text: str, failure: str, fix: str) -> SparkforgeError:
    """Return the error for what docker printed: a known one by name, else an EngineError with the last lines."""
    if match := NO_SPACE.search(text):
        return StorageError("the Docker engine has no space left", match[0].strip()[:500], PRUNE, code="storage.full")
    for pattern, code, problem, next_step in COMPLAINTS:
        if match := re.search(f"(?im)^.*(?:{pattern}).*$", text):
            host = _REGISTRY.search(match[0])
            families = {family.family: family for family in SparkforgeError.__subclasses__()}
            next_step = next_step.replace("HOST", host[1]) if host else next_step  # noqa: PLW2901
            return families[code.partition(".")[0]](problem, match[0].strip()[:500], next_step, code=code)
    tail = "\n        ".join(line for line in text.strip().splitlines()[-TAIL_LINES:] if line.strip())
    return EngineError(failure, tail or "it printed nothing", fix, code="engine.failed")


def docker(arguments: Sequence[str | Path], *, env: Mapping[str, str] | None = None, fix: str = "") -> str:
    """Run `docker` in the checkout, with `env` added, and return its stdout. Raises what `explained` returns."""
    result = run_unchecked([program(), *arguments], cwd=paths.ROOT, env=env)
    if result.returncode:
        fix = fix or f"{shlex.join(['docker', *map(str, arguments)])}   # by hand"
        raise explained(result.stdout + result.stderr, _failed(arguments, result.returncode), fix)
    return result.stdout


def docker_logged(
    arguments: Sequence[str | Path], log: Path, update: Callable[[str], None], env: Mapping[str, str] | None = None
) -> None:
    """Run a long `docker` command with its output in `log`; `update` gets the build step it is at.

    An exception here, such as Ctrl-C, ends it. Raises as `docker` does; the fix of an unknown failure is the log.
    """
    child = Child([program(), *arguments], log=log, env=env or {}, cwd=paths.ROOT)
    try:
        while (usage := child.poll()) is None:
            if steps := _BUILD_STEP.findall(log.read_text(encoding="utf-8", errors="replace")[-LOG_END:]):
                update(steps[-1])
            time.sleep(POLL_SECONDS)
    except BaseException:
        child.end()
        raise
    if usage.code:
        text = log.read_text(encoding="utf-8", errors="replace")[-LOG_END:]
        raise explained(text, _failed(arguments, usage.code), on("less", log))


def program() -> str:
    """Return the path of the `docker` command. Raises EngineError."""
    if path := shutil.which("docker"):
        return path
    raise EngineError("there is no docker command", "PATH holds none", INSTALL, code="engine.missing")


def require_plugin(name: str) -> str:
    """Return the version of `docker NAME` (buildx or compose). Raises EngineError if it is not there."""
    return docker([name, "version"]).strip().splitlines()[0]


def _failed(arguments: Sequence[str | Path], code: int) -> str:
    return f"docker {arguments[0]} ended with code {code}"
