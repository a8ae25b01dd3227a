"""The devices that a user can name, and the stack of each."""

import os

from sparkforge import pins
from sparkforge.core.errors import UsageError

# The devices: vLLM's CPU build or its CUDA build in an environment, or a container with or without a GPU.
AUTO, EMBEDDED, GPU, DOCKER, DOCKER_CPU = "auto", "embedded", "gpu", "docker", "docker-cpu"
CONTAINERS = (DOCKER, DOCKER_CPU)
FLEET = "fleet"  # only in a record: several models, each on its own device
CPU, CUDA = "cpu", "cuda"  # an image's device: `device` of [stacks.NAME.image], tables of deploy/trim.toml
OCI_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def machine_of(platform: str, command: str = "--platform") -> str:
    """Return the machine, as `uname -m` prints it, of an OCI platform such as linux/arm64; default: this machine.

    Raises UsageError for an unknown platform; `command` is the command and option for the error's fix.
    """
    system, _, architecture = platform.partition("/")
    if platform and (system != "linux" or architecture not in OCI_MACHINES):
        known = ", ".join(f"linux/{name}" for name in OCI_MACHINES)
        raise UsageError(f"--platform {platform[:40]!r} is not known", f"choose from {known}", f"{command} linux/arm64")
    return OCI_MACHINES.get(architecture, os.uname().machine)


def stack_of(device: str, stack: str = "") -> str:
    """Return the stack that a device serves, `stack` if that is named. Raises UsageError if it cannot serve it."""
    table = pins.load()
    stack = stack or table.devices.get(device, table.default)
    fix = f"without --stack   # or ./inv up --device {DOCKER} --stack {stack}"
    if device == EMBEDDED and stack not in table.environments:
        served = ", ".join(name for name in table.stacks if name in table.environments)
        why = f"it serves from an environment of pins.toml, and only {served} has one: {stack} has no CPU build"
        raise UsageError(f"the device {device} cannot serve the stack {stack}", why, fix)
    if device == GPU and stack != table.default:
        why = f"it serves from the environment {GPU} of pins.toml, which has the stack {table.default}"
        raise UsageError(f"the device {device} cannot serve the stack {stack}", why, fix)
    if device == DOCKER_CPU and table.image(stack).device != CPU:
        raise UsageError(f"the device {device} cannot serve the stack {stack}", "its image needs a GPU", fix)
    if device == DOCKER:
        table.image(stack)
    return stack


def environment_of(device: str, stack: str = "") -> str:
    """Return the name of the environment from which `embedded` or `gpu` serves. Raises as `stack_of`."""
    stack = stack_of(device, stack)
    return GPU if device == GPU else stack


def build_command(stack: str) -> str:
    """Return the command that builds a stack's image."""
    return f"./inv build --engine {DOCKER} --stack {stack}"
