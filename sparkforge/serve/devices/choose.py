"""The choice of a device, with the reason in one line."""

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.console import Steps
from sparkforge.core.errors import RefusalError, SparkforgeError, UsageError
from sparkforge.image.devices import AUTO, DOCKER, DOCKER_CPU, EMBEDDED, GPU
from sparkforge.plan import capabilities
from sparkforge.serve.devices.device import Device
from sparkforge.serve.record import StartPlan

NAMES = (AUTO, EMBEDDED, GPU, DOCKER, DOCKER_CPU)
NVIDIA_DRIVER = "proc/driver/nvidia/version"
PRODUCT = "sys/class/dmi/id/product_name"  # such as "NVIDIA_DGX_Spark", by public reports; not checked by us


@dataclass(frozen=True)
class Choice:
    """A device and the reason for it."""

    device: str
    why: str


def has_driver(root: Path = Path("/")) -> bool:
    """Tell whether an NVIDIA driver is loaded on the machine whose files lie under `root`."""
    return (root / NVIDIA_DRIVER).exists()


def choose(name: str, root: Path = Path("/"), processor: str = platform.machine()) -> Choice:
    """Return the device `name`; `auto` chooses by the machine with its files under `root`. Raises UsageError."""
    if name in NAMES and name != AUTO:
        return Choice(name, "you asked for it")
    if name != AUTO:
        raise UsageError(f"unknown device {name!r}", f"the devices are {', '.join(NAMES)}", "./inv up --device auto")
    if not has_driver(root):
        return Choice(EMBEDDED, "no NVIDIA driver is loaded; vLLM's CPU build serves")
    if processor != "aarch64":
        return _without_docker(f"this machine is {processor}, and the image is for a Spark, which is aarch64")
    from sparkforge.image import engine  # noqa: PLC0415 - the Docker SDK takes half a second to load

    product = ""
    with suppress(OSError):
        product = (root / PRODUCT).read_text(encoding="utf-8").strip()
    try:
        with engine.connected() as client:
            docker_engine = engine.read(client)
            docker_engine.require_gpu()
    except SparkforgeError as error:
        return _without_docker(f"{error.what} ({error.fix})")
    product = product or "an aarch64 machine with an NVIDIA driver"
    return Choice(DOCKER, f"this is {product} and Docker {docker_engine.version} has the GPU by {docker_engine.gpu}")


def _without_docker(reason: str) -> Choice:
    """Return `gpu` if this machine's GPU can serve from an environment, else `embedded`."""
    try:
        name, _ = capabilities.find(os.environ)
    except RefusalError as error:
        return Choice(EMBEDDED, f"{reason}; {error.why}; vLLM's CPU build serves")
    return Choice(GPU, f"{reason}; {name} is free, and vLLM's CUDA build serves on it")


def device_for(plan: StartPlan, build: Callable[[str, Steps], None]) -> Device:
    """Check a plan and return its device; `build(stack, steps)` makes a missing image."""
    if plan.device == EMBEDDED:
        from sparkforge.serve.devices.in_environment import Embedded  # noqa: PLC0415 - only one of them is loaded

        return Embedded(plan)
    if plan.device == GPU:
        from sparkforge.serve.devices.in_environment import Gpu  # noqa: PLC0415

        return Gpu(plan)
    from sparkforge.serve.devices.container import Container  # noqa: PLC0415 - the Docker SDK takes half a second

    return Container(plan, build)
