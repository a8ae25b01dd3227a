"""Build the container image through Compose, and compute the hashes that it must contain."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from sparkforge import pins
from sparkforge.compile.stages import require_way
from sparkforge.core import paths
from sparkforge.core.console import Steps, say
from sparkforge.core.docker import docker, docker_logged
from sparkforge.core.errors import EngineError, ProcessError
from sparkforge.core.files import write_atomic, write_json
from sparkforge.core.git import checkout_git
from sparkforge.image import compose, devices
from sparkforge.image.compose import SERVICE
from sparkforge.image.packs import build_context
from sparkforge.patching import series
from sparkforge.pins import locks

# BuildKit's exporter options for a reproducible image: no file time is later than SOURCE_DATE_EPOCH.
REWRITTEN = "rewrite-timestamp=true,compression=gzip,force-compression=true"
UNASKED = {"BUILDX_BAKE_ENTITLEMENTS_FS": "0"}  # else buildx asks before it reads or writes outside the checkout


@dataclass(frozen=True)
class ImageOptions:
    """How an image is built: `way` is `wheel` (upstream's vLLM) or `source` (vLLM compiled from source).

    `packs` is a place of kernel packs. For another `platform` than the engine's, such as linux/arm64, the image's name
    ends with the architecture. A `reproducible` image can be rebuilt bit for bit (`bake`).
    """

    way: str = "wheel"
    jobs: str = "auto"
    packs: str = ""
    platform: str = ""
    reproducible: bool = False


def build(
    command: Sequence[str | Path], stack: str, options: ImageOptions | None = None, steps: Steps | None = None
) -> Path:
    """Build a stack's image with `docker` and `command`, which ends in Compose's `build`; return the build's log.

    Raises UsageError for an unknown `way`, and a named error of the engine or EngineError with the log's last lines.
    """
    way, jobs, packs, platform, reproducible = astuple(options or ImageOptions())
    require_way(way, devices.machine_of(platform))
    log = paths.state() / "logs" / "image.log"
    origin, folder = build_context(packs)
    arguments = {"VLLM_FROM": way, "JOBS": jobs, **({"KERNEL_PACKS": origin} if origin else {}), **commit()}
    service: dict[str, Any] = {"build": {"additional_contexts": {"packs": str(folder)}} if folder else {}}
    if platform:
        platforms = re.search(r"^Platforms:\s*(.*)$", docker(["buildx", "inspect"]), re.MULTILINE)
        if platforms and platform not in re.split(r"[,\s*]+", platforms[1]):
            why = f"Debian's packages need programs for it during installation, and its builder runs {platforms[1]}"
            fix = "sudo apt install qemu-user-static (or qemu-user-binfmt), sudo systemctl restart docker"
            raise EngineError(f"the Docker engine runs no program for {platform}", why, fix, code="engine.failed")
        name = f"{compose.resolve(compose.variables(stack)).image}-{platform.rpartition('/')[2]}"
        service = {"image": name, "build": {**service["build"], "platforms": [platform]}}
    if folder or platform:
        override = paths.state() / "build.compose.json"
        write_json(override, {"services": {SERVICE: service}})
        command = [*command[:-1], "--file", override, command[-1]]
    flags = [flag for name, value in arguments.items() for flag in ("--build-arg", f"{name}={value}")]
    with (steps or Steps(1)).step("build", f"{way}, the whole log in {log}") as tell:
        if reproducible:
            bake(command[:-1], arguments, stack, log, tell)
        else:
            docker_logged([*command, *flags, SERVICE], log, tell, compose.variables(stack))
        tell(f"log in {log}")
    if platform:
        say(f"{name} is for {platform}: ./inv image.publish REPOSITORY --image {name}")
    return log


def bake(
    command: Sequence[str | Path], arguments: Mapping[str, str], stack: str, log: Path, tell: Callable[[str], None]
) -> None:
    """Build the service of the Compose `command` with the build `arguments` as an archive, and load the archive.

    Every file gets the commit's time, which the engine's own exporter refuses to write (BuildKit: `rewrite-timestamp`
    conflicts with `unpack`), and no label names a version of Compose. Raises as `docker_logged` does.
    """
    project, archive = paths.state() / "build.resolved.yaml", paths.state() / "build.image.tar"
    write_atomic(project, docker([*command, "config", "--format", "json"], env=compose.variables(stack)))
    flags = [word for item in arguments.items() for word in ("--set", f"{SERVICE}.args.{'='.join(item)}")]
    flags += ["--set", f"{SERVICE}.output=type=oci,dest={archive},{REWRITTEN}"]
    words: list[str | Path] = ["buildx", "bake", "--progress", "plain", "--provenance=false", "--file", project]
    try:
        docker_logged([*words, *flags, SERVICE], log, tell, UNASKED)
        tell("load the archive")
        docker(["image", "load", "--input", archive])
    finally:
        archive.unlink(missing_ok=True)


def commit() -> dict[str, str]:
    """Return the commit and its time as build arguments; every file in a reproducible image gets this time.

    A checkout with changes is marked. A checkout without git history has no arguments; the label says so (Dockerfile).
    """
    try:
        revision, time = checkout_git(paths.ROOT, "log", "-1", "--format=%H %ct").split()
    except ProcessError:
        return {}
    changed = checkout_git(paths.ROOT, "status", "--porcelain").strip()
    return {"REVISION": f"{revision}-changed" if changed else revision, "SOURCE_DATE_EPOCH": time}


def expected(machine: str, *, stack: str) -> Mapping[str, Mapping[str, str]]:
    """Return the hashes in an image of this checkout for `machine` (amd64, arm64): queues and lock, name → sha256."""
    lock = pins.load().image(stack).lock(devices.OCI_MACHINES[machine])
    return {
        "patches": {queue.name: queue.sha256 for _, queue in series.queues(pins.load(), stack)},
        "lock": {lock: hashlib.sha256(locks.lock_path(lock).read_bytes()).hexdigest()},
    }
