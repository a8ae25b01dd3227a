"""Which device serves, and why, in one line."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.console import Steps
from sparkforge.core.errors import SparkforgeError, UsageError
from sparkforge.image.devices import AUTO, DOCKER, DOCKER_CPU, EMBEDDED
from sparkforge.serve.devices.device import Device
from sparkforge.serve.plan import StartPlan

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


def choose(name: str) -> Choice:
    """Return the device of that name; `auto` looks at the machine. Raises UsageError for an unknown name."""
    if name in {EMBEDDED, DOCKER, DOCKER_CPU}:
        return Choice(name, "you asked for it")
    if name != AUTO:
        raise UsageError(f"unknown device {name!r}", f"the devices are {', '.join(NAMES)}", "./inv up --device auto")
    if platform.machine() != "aarch64":
        return Choice(EMBEDDED, f"this machine is {platform.machine()}, a Spark is aarch64; vLLM's CPU build serves")
    if not NVIDIA_DRIVER.exists():
        return Choice(EMBEDDED, "no NVIDIA driver is loaded; vLLM's CPU build serves")
    from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

    product = ""
    with suppress(OSError):
        product = PRODUCT.read_text(encoding="utf-8").strip()
    try:
        with engine.connected() as client:
            docker_engine = engine.read(client)
            docker_engine.require_gpu()
    except SparkforgeError as error:
        return Choice(EMBEDDED, f"{error.what} ({error.fix}); until then vLLM's CPU build serves")
    product = product or "an aarch64 machine with an NVIDIA driver"
    return Choice(DOCKER, f"this is {product} and Docker {docker_engine.version} has the GPU by {docker_engine.gpu}")


def device_for(plan: StartPlan, build: Callable[[str, Steps], None]) -> Device:
    """Return the device of a plan, which is checked; `build(stack, steps)` makes a missing image."""
    if plan.device == EMBEDDED:
        from sparkforge.serve.devices.embedded import Embedded  # noqa: PLC0415 - only one of them is loaded

        return Embedded(plan)
    from sparkforge.serve.devices.container import Container  # noqa: PLC0415 - the Docker SDK takes half a second

    return Container(plan, build)
