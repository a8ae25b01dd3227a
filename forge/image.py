"""Build the container image through Compose, whose files name image, stages and secrets, and say what it must hold."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge import locks, pins, rootfs
from sparkforge import paths
from sparkforge.console import Steps
from sparkforge.docker_cli import docker_logged
from sparkforge.errors import UsageError
from sparkforge.process import run

WAYS = ("wheel", "source")
SERVICE = "vllm"


def build(words: Sequence[str | Path], *, way: str = "wheel", jobs: str = "auto", steps: Steps | None = None) -> Path:
    """Build the image with `docker` and `words`, which end in Compose's `build`; return the build's log.

    `way` is how vLLM gets in: upstream's wheel, or compiled from source. Raises UsageError for another one, and a
    named error of the engine or EngineError with the log's last lines.
    """
    if way not in WAYS:
        raise UsageError(
            f"--from {way!r} is no way to vLLM", f"there are {' and '.join(WAYS)}", "./inv build --from wheel"
        )
    log = paths.state() / "logs" / "image.log"
    arguments = {"VLLM_FROM": way, "JOBS": jobs, **commit()}
    flags = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    with (steps or Steps(1)).step("build", f"{way}, the whole log in {log}") as tell:
        docker_logged([*words, *flags, SERVICE], log, tell)
        tell(f"log in {log}")
    return log


def commit() -> dict[str, str]:
    """Return the commit and its time as build arguments: the time is every file's in the image (reproducible builds).

    A checkout with changes is marked, and one without git history is told as it is.
    """
    if shutil.which("git") is None:
        return {"REVISION": "unknown"}
    told = run(["git", "log", "-1", "--format=%H %ct"], cwd=paths.ROOT, check=False)
    if told.returncode:
        return {"REVISION": "unknown"}
    revision, time = told.stdout.split()
    changed = run(["git", "status", "--porcelain"], cwd=paths.ROOT).stdout.strip()
    return {"REVISION": f"{revision}-changed" if changed else revision, "SOURCE_DATE_EPOCH": time}


def expected(machine: str, *, cpu: bool) -> Mapping[str, Mapping[str, str]]:
    """Return what an image made from this checkout holds: patch queues and the locked set, name → sha256.

    `machine` is the image's: amd64 or arm64.
    """
    device = rootfs.CPU if cpu else rootfs.CUDA
    lock = "embedded" if cpu else "spark" if machine == "arm64" else "spark-amd64"
    return {
        "patches": {f"{queue.upstream}-{queue.version}": queue.sha256 for queue in rootfs.queues(device, pins.load())},
        "lock": {lock: hashlib.sha256(locks.lock_path(lock).read_bytes()).hexdigest()},
    }
