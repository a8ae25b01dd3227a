"""Which device serves, and why, in one line."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from sparkforge.errors import DeviceError, UsageError

EMBEDDED, DOCKER, AUTO = "embedded", "docker", "auto"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Choice:
    """A device and the reason for it."""

    device: str
    why: str


def choose(asked: str) -> Choice:
    """Turn a word into a device. Raises UsageError for an unknown word, DeviceError while `docker` has no path."""
    if asked == EMBEDDED:
        return Choice(EMBEDDED, "you asked for it")
    if asked == DOCKER:
        raise DeviceError(
            "the docker device cannot serve yet",
            "it comes with the container path, which is not built yet",
            "./inv up --device embedded",
        )
    if asked != AUTO:
        raise UsageError(
            f"unknown device {asked!r}", "the devices are auto, embedded and docker", "./inv up --device auto"
        )
    return Choice(EMBEDDED, f"{_machine()}; the container path is not built yet, so vLLM's CPU build serves")


def _machine() -> str:
    gpu = "an NVIDIA driver is loaded" if NVIDIA_DRIVER.exists() else "no NVIDIA driver is loaded"
    docker = "docker is installed" if shutil.which("docker") else "docker is not installed"
    return f"{gpu}, {docker}"
