"""Which device serves, and why, in one line."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from sparkforge.errors import SparkforgeError, UsageError

EMBEDDED, DOCKER, DOCKER_CPU, AUTO = "embedded", "docker", "docker-cpu", "auto"
NAMES = (AUTO, EMBEDDED, DOCKER, DOCKER_CPU)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
PRODUCT = Path("/sys/class/dmi/id/product_name")  # "NVIDIA_DGX_Spark" and the like; by public reports, not seen by us


@dataclass(frozen=True)
class Choice:
    """A device and the reason for it."""

    device: str
    why: str

    @property
    def container(self) -> bool:
        """Whether it serves in a container."""
        return self.device in {DOCKER, DOCKER_CPU}


def choose(asked: str) -> Choice:
    """Turn a word into a device. Raises UsageError for an unknown word."""
    if asked in {EMBEDDED, DOCKER, DOCKER_CPU}:
        return Choice(asked, "you asked for it")
    if asked != AUTO:
        raise UsageError(f"unknown device {asked!r}", f"the devices are {', '.join(NAMES)}", "./inv up --device auto")
    if missing := _no_spark():
        return Choice(EMBEDDED, f"{missing}; vLLM's CPU build serves")
    return _by_engine()


def refuse_profile(profile: str) -> None:
    """Raise UsageError for a serve profile on the embedded device, which has one of its own."""
    if profile:
        raise UsageError(
            f"--profile {profile} is for containers",
            "the embedded device has one set of flags, [profiles.embedded] of serve/profiles.toml",
            f"./inv up --device docker --profile {profile}",
        )


def _no_spark() -> str:
    """Say what this machine lacks to be a Spark or a relative of it; empty if it is one."""
    if platform.machine() != "aarch64":
        return f"this machine is {platform.machine()}, a Spark is aarch64"
    return "" if NVIDIA_DRIVER.exists() else "no NVIDIA driver is loaded"


def _by_engine() -> Choice:
    """Take Docker if its engine can give a container the GPU."""
    from serve import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

    try:
        with engine.connected() as client:
            found = engine.read(client)
            found.require_gpu()
    except SparkforgeError as error:
        return Choice(EMBEDDED, f"{error.what} ({error.fix}); until then vLLM's CPU build serves")
    return Choice(DOCKER, f"this is {_product()} and Docker {found.version} has the GPU by {found.gpu}")


def _product() -> str:
    try:
        return PRODUCT.read_text(encoding="utf-8").strip() or "an aarch64 machine with an NVIDIA driver"
    except OSError:
        return "an aarch64 machine with an NVIDIA driver"
