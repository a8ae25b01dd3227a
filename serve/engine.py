"""What the Docker engine is and has, read through its API: version, GPU access, images, our containers."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException

from sparkforge.docker_cli import INSTALL, explained
from sparkforge.errors import (
    EngineDownError,
    EngineError,
    EngineMissingError,
    EnginePermissionError,
    GpuRuntimeError,
    ImageMismatchError,
    ImageMissingError,
    SparkforgeError,
)

SECONDS = 20  # until an engine that does not answer is given up; starting a container takes it seconds at most
NVIDIA = "nvidia"
CDI_KIND = "nvidia.com/gpu"
HOOK = "nvidia-container-runtime-hook"  # with it on its PATH, dockerd takes GPU reservations without a runtime entry
CDI_ENTRY = re.compile(rf'["\']?kind["\']?\s*:\s*["\']?{re.escape(CDI_KIND)}')
START = "sudo systemctl start docker"
JOIN = "sudo usermod -aG docker $USER, log out and in, then run the same command again"
GIVE_GPU = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
# The engine's word for a processor → OCI's, which images carry.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}


@dataclass(frozen=True)
class Engine:
    """A running engine: its version, platform as OCI writes it (linux/arm64), and how it gives GPUs to containers."""

    version: str
    platform: str
    runtimes: tuple[str, ...]
    cdi: tuple[str, ...]
    hook: bool
    root: str
    rootless: bool

    @property
    def gpu(self) -> str:
        """How a container gets the GPU here, in words; empty if it cannot."""
        ways = (
            (NVIDIA in self.runtimes, "NVIDIA runtime"),
            (bool(self.cdi), f"CDI device {next(iter(self.cdi), '')}"),
            (self.hook, HOOK),
        )
        return next((words for there, words in ways if there), "")

    def require_gpu(self) -> None:
        """Raise GpuRuntimeError if a container cannot get the GPU."""
        if not self.gpu:
            why = f"it knows the runtimes {', '.join(self.runtimes) or 'none'} and no CDI device {CDI_KIND}"
            raise GpuRuntimeError("the Docker engine cannot give a container the GPU", why, GIVE_GPU)


@dataclass(frozen=True)
class State:
    """What a container does now: `status` as Docker names it, `health` (empty without a health check), exit code."""

    status: str
    health: str
    exit_code: int
    restarts: int
    out_of_memory: bool
    said: str

    @property
    def runs(self) -> bool:
        """Whether its program runs."""
        return self.status in {"running", "paused"}


@contextmanager
def connected() -> Iterator[docker.DockerClient]:
    """Open the engine that the `docker` command would use (DOCKER_HOST, else its context), and name what goes wrong.

    Raises EngineMissingError, EngineDownError, EnginePermissionError, ImageMissingError or EngineError.
    """
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
    """Return our error for one of the SDK's."""
    if isinstance(error, APIError) and error.response is not None:
        return explained(str(error.explanation or error), f"the engine answered {error.status_code}", "docker info")
    chain = list(_chain(error))
    if any(isinstance(link, requests.Timeout | TimeoutError) for link in chain):
        return EngineDownError(
            "the Docker engine does not answer", f"no answer within {SECONDS} s", "sudo systemctl restart docker"
        )
    numbers = {link.errno for link in chain if isinstance(link, OSError)}
    if numbers & {errno.EACCES, errno.EPERM}:
        return EnginePermissionError("no permission to use the Docker engine", _told(chain), JOIN)
    if numbers & {errno.ENOENT, errno.ECONNREFUSED, errno.ENOTSOCK, errno.ENOTDIR, errno.ECONNRESET}:
        return _absent(_told(chain))
    return EngineError("the Docker engine cannot be used", _told(chain), "docker info")


def read(client: docker.DockerClient) -> Engine:
    """Return what the engine says of itself."""
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


def require_image(client: docker.DockerClient, name: str, platform: str, build: str) -> Any:
    """Return the image `name`; `build` is the command that makes it.

    Raises ImageMissingError, or ImageMismatchError if it is for another platform than `platform`.
    """
    try:
        image = client.images.get(name)
    except docker.errors.ImageNotFound as error:
        raise missing(name, build) from error
    found = platform_of(image.attrs)
    if found != platform:
        raise ImageMismatchError(f"{name} is for another platform", f"it is {found}, the engine is {platform}", build)
    return image


def missing(name: str, build: str) -> ImageMissingError:
    """Build the error for an image that is not there; `build` makes it."""
    return ImageMissingError(f"there is no image {name}", "it was not built here yet", build)


def platform_of(attrs: Mapping[str, Any]) -> str:
    """Return an image's platform as OCI writes it: linux/arm64."""
    return f"{attrs.get('Os', '')}/{attrs.get('Architecture', '')}"


def state(client: docker.DockerClient, container: str) -> State | None:
    """Return what a container does; None if it is gone."""
    try:
        told = client.api.inspect_container(container)
    except docker.errors.NotFound:
        return None
    found, health = told["State"], told["State"].get("Health") or {}
    log = health.get("Log") or [{}]
    return State(
        status=str(found.get("Status", "")),
        health=str(health.get("Status", "")),
        exit_code=int(found.get("ExitCode", 0)),
        restarts=int(told.get("RestartCount", 0)),
        out_of_memory=bool(found.get("OOMKilled")),
        said=str(log[-1].get("Output", "")).strip(),
    )


def runs(container: str) -> bool:
    """Tell whether a container runs; an engine that is down or gone runs none."""
    try:
        with connected() as client:
            found = state(client, container)
    except (EngineDownError, EngineMissingError):
        return False
    return found is not None and found.runs


def service_container(client: docker.DockerClient, project: str, service: str) -> str | None:
    """Return the id of the newest container of a Compose service, running or not; None if there is none."""
    labels = [f"com.docker.compose.project={project}", f"com.docker.compose.service={service}"]
    found = client.api.containers(all=True, filters={"label": [*labels, "com.docker.compose.oneoff=False"]})
    newest = max(found, key=lambda container: container["Created"], default=None)
    return str(newest["Id"]) if newest else None


def _cdi_devices(info: dict[str, Any]) -> tuple[str, ...]:
    """Return the NVIDIA devices of the Container Device Interface, as the engine or the files of its folders name them.

    Engines since API 1.50 list what they discovered; older ones only where they look.
    """
    told = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or []]
    if named_by_engine := tuple(sorted(name for name in told if name.startswith(f"{CDI_KIND}="))):
        return named_by_engine
    for folder in info.get("CDISpecDirs") or []:
        for file in sorted(Path(folder).glob("*")):
            if file.suffix in {".yaml", ".yml", ".json"} and CDI_ENTRY.search(_text(file)):
                return (f"{CDI_KIND} ({file})",)
    return ()


def _text(file: Path) -> str:
    """Return a file's text; one that only root may read, or that is a folder, tells us nothing."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _absent(why: str) -> SparkforgeError:
    if shutil.which("docker") or shutil.which("dockerd"):
        return EngineDownError("the Docker engine does not run", why, START)
    return EngineMissingError("no Docker engine is installed", why, INSTALL)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and everything it was made from: the SDK, requests and urllib3 each wrap the one below."""
    seen, waiting = set[int](), [error]
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [each for each in (*link.args, link.__cause__, link.__context__) if isinstance(each, BaseException)]


def _told(chain: list[BaseException]) -> str:
    """The words of the operating system if there are any, else of the outermost error."""
    words = [
        f"{link.strerror}: {link.filename}" if link.filename else link.strerror
        for link in chain
        if isinstance(link, OSError) and link.strerror
    ]
    return str(words[0]) if words else str(chain[0])
