"""The Docker engine, read through its API: version, GPU access, images, our containers."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException

from sparkforge.core.docker import INSTALL, explained
from sparkforge.core.errors import EngineError, IntegrityError, SparkforgeError

SECONDS = 20  # timeout of an engine's answer; starting a container takes seconds at most
UNPACK_SECONDS = 1800  # the same for an image's first container, for which the engine may unpack the image
FIRST_CLOSED = 28  # the first Docker that opens ports published on 127.0.0.1 only to this machine
NVIDIA = "nvidia"
CDI_KIND = "nvidia.com/gpu"
HOOK = "nvidia-container-runtime-hook"  # on dockerd's PATH: GPU reservations work without a runtime entry
CDI_ENTRY = re.compile(rf'["\']?kind["\']?\s*:\s*["\']?{re.escape(CDI_KIND)}')
START = "sudo systemctl start docker"
JOIN = "sudo usermod -aG docker $USER   # then log out and in"
GIVE_GPU = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
# The engine's name of a processor → OCI's name, as in images.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}


@dataclass(frozen=True)
class Engine:
    """A running engine: its version, OCI platform (linux/arm64), and the way in which containers get GPUs."""

    version: str
    platform: str
    runtimes: tuple[str, ...]
    cdi: tuple[str, ...]
    hook: bool
    root: str
    rootless: bool

    @property
    def gpu(self) -> str:
        """The way in which a container gets the GPU, in words; empty if there is none."""
        if NVIDIA in self.runtimes:
            return "NVIDIA runtime"
        return f"CDI device {self.cdi[0]}" if self.cdi else HOOK if self.hook else ""

    @property
    def leaks_loopback_ports(self) -> bool:
        """Whether a port published on 127.0.0.1 can be reached by machines of the same layer-2 network.

        Docker 28 closed that (moby/moby issue 45610); a rootless engine publishes through a separate process.
        """
        major = self.version.partition(".")[0]
        return major.isdecimal() and int(major) < FIRST_CLOSED and not self.rootless

    def require_gpu(self) -> None:
        """Raise EngineError if a container cannot get the GPU."""
        if not self.gpu:
            why = f"it has the runtimes {', '.join(self.runtimes) or 'none'} and no CDI device {CDI_KIND}"
            raise EngineError("the Docker engine cannot give a container the GPU", why, GIVE_GPU, code="engine.gpu")


@dataclass(frozen=True)
class State:
    """A container's state: `status` as Docker names it, `health` empty without a health check.

    `started` is the time of its program's last start (RFC 3339); empty if unknown.
    """

    status: str
    health: str
    exit_code: int
    restarts: int
    out_of_memory: bool
    health_output: str
    started: str = ""

    @property
    def runs(self) -> bool:
        """Whether the container's program runs."""
        return self.status in {"running", "paused"}


@contextmanager
def connected() -> Iterator[docker.DockerClient]:
    """Open the engine that `docker` would use (DOCKER_HOST, else its context). Raises EngineError for its errors."""
    client = None
    try:
        client = docker.from_env(timeout=SECONDS, version="auto")
        yield client
    except (DockerException, requests.RequestException) as error:
        raise named(error) from error
    finally:
        if client is not None:
            client.close()


def named(error: Exception) -> SparkforgeError:
    """Return our error for an error of the SDK."""
    if isinstance(error, APIError) and error.response is not None:
        return explained(str(error.explanation or error), f"the engine answered {error.status_code}", "docker info")
    text = str(error)  # the SDK's error wraps that of requests, which wraps that of urllib3
    if innermost := re.search(r"\w+Error\(\d[^()]*\)", text):
        text = innermost[0]
    if "timed out" in text.lower():
        why = f"no answer within {SECONDS} s"
        failure = "the Docker engine does not answer"
        return EngineError(failure, why, "sudo systemctl restart docker", code="engine.down")
    if "PermissionError" in text:
        return EngineError("no permission to use the Docker engine", text, JOIN, code="engine.permission")
    if re.search(r"FileNotFoundError|NotADirectoryError|Connection(?:Refused|Reset)Error|non-socket", text):
        if shutil.which("docker") or shutil.which("dockerd"):
            return EngineError("the Docker engine does not run", text, START, code="engine.down")
        return EngineError("no Docker engine is installed", text, INSTALL, code="engine.missing")
    return EngineError("the Docker engine cannot be used", text, "docker info", code="engine.failed")


def read(client: docker.DockerClient) -> Engine:
    """Return the engine's facts."""
    info = client.info()
    machine = str(info.get("Architecture", ""))
    return Engine(
        version=str(info.get("ServerVersion", "")),
        platform=f"{info.get('OSType', 'linux')}/{ARCHITECTURES.get(machine, machine)}",
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        cdi=_cdi_devices(info),
        hook=shutil.which(HOOK) is not None,
        root=str(info.get("DockerRootDir", "")),
        rootless=any("rootless" in option for option in info.get("SecurityOptions") or []),
    )


def image(client: docker.DockerClient, name: str, build: str) -> Any:
    """Return the image `name`. Raises EngineError if it is not there; `build` is the command that makes it."""
    try:
        return client.images.get(name)
    except docker.errors.ImageNotFound as error:
        failure = f"there is no image {name}"
        raise EngineError(failure, "it was not built here yet", build, code="engine.image") from error


def require_image(client: docker.DockerClient, name: str, platform: str, build: str) -> Any:
    """Return the image `name`. Raises EngineError, or IntegrityError if it is for another platform than `platform`."""
    named_image = image(client, name, build)
    if (built_for := platform_of(named_image.attrs)) != platform:
        why = f"it is {built_for}, the engine is {platform}"
        raise IntegrityError(f"{name} is for another platform", why, build, code="integrity.image")
    return named_image


def platform_of(attrs: Mapping[str, Any]) -> str:
    """Return an image's platform in OCI's form, such as linux/arm64."""
    return f"{attrs.get('Os', '')}/{attrs.get('Architecture', '')}"


def state(client: docker.DockerClient, container: str) -> State | None:
    """Return a container's state; None if it is gone."""
    try:
        details = client.api.inspect_container(container)
    except docker.errors.NotFound:
        return None
    current, health = details["State"], details["State"].get("Health") or {}
    started = str(current.get("StartedAt", ""))
    # A container that was stopped and started again keeps its earlier health results.
    log = [entry for entry in health.get("Log") or [] if _since(started, str(entry.get("Start", "")))] or [{}]
    return State(
        status=str(current.get("Status", "")),
        health=str(health.get("Status", "")),
        exit_code=int(current.get("ExitCode", 0)),
        restarts=int(details.get("RestartCount", 0)),
        out_of_memory=bool(current.get("OOMKilled")),
        health_output=str(log[-1].get("Output", "")).strip(),
        started=started,
    )


def _since(started: str, moment: str) -> bool:
    """Tell whether the engine's time `moment` is not before `started`; yes if either is unknown."""
    try:
        return datetime.fromisoformat(moment) >= datetime.fromisoformat(started)
    except (ValueError, TypeError):
        return True


def runs(container: str) -> bool:
    """Tell whether a container runs; no if the engine is down or missing."""
    try:
        with connected() as client:
            current = state(client, container)
    except EngineError as error:
        if error.code not in {"engine.down", "engine.missing"}:
            raise
        return False
    return current is not None and current.runs


def mounted_from(container: str, target: str) -> str:
    """Return the file or folder of the host that a container has at `target`; empty if there is none."""
    with connected() as client:
        try:
            mounts = client.api.inspect_container(container).get("Mounts") or []
        except docker.errors.NotFound:
            return ""
    return next((str(mount.get("Source", "")) for mount in mounts if mount.get("Destination") == target), "")


def service_container(client: docker.DockerClient, project: str, service: str) -> str | None:
    """Return the id of the newest container of a Compose service, running or not; None if there is none."""
    labels = [f"com.docker.compose.project={project}", f"com.docker.compose.service={service}"]
    containers = client.api.containers(all=True, filters={"label": [*labels, "com.docker.compose.oneoff=False"]})
    newest = max(containers, key=lambda container: container["Created"], default=None)
    return str(newest["Id"]) if newest else None


def _cdi_devices(info: dict[str, Any]) -> tuple[str, ...]:
    """Return the NVIDIA devices of the Container Device Interface; engines before API 1.50 name only their folders."""
    names = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or []]
    if discovered := tuple(sorted(name for name in names if name.startswith(f"{CDI_KIND}="))):
        return discovered
    for folder in info.get("CDISpecDirs") or []:
        for file in sorted(Path(folder).glob("*")):
            with suppress(OSError):
                if file.suffix in {".yaml", ".yml", ".json"} and CDI_ENTRY.search(file.read_text(errors="replace")):
                    return (f"{CDI_KIND} ({file})",)
    return ()
