"""Whether a model fits the memory that is free now: the validator's own check, on the host, before a container starts.

The container asks again. Out here it can be said which process holds the memory, and nothing has been started yet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkforge.core.console import say
from sparkforge.core.errors import RefusalError, StorageError, UsageError
from sparkforge.core.process import ProbeError
from sparkforge.core.vllm_flags import REVISION, flag_value
from sparkforge.image.compose import SERVICE, Service
from sparkforge.models import local
from sparkforge.plan import devices
from sparkforge.serve import entrypoint, profiles, settings
from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts import checkpoint, gpu, machine
from validate.facts.fact import gather
from validate.facts.target import Options, Target

CHECK = "memory-unified"


def require_room(service: Service, project: Mapping[str, Any]) -> None:
    """Raise RefusalError if the service's model does not fit this machine's unified memory as it is now.

    `project` is the resolved project of the service: its mounts say where the model lies.

    What cannot be known out here, such as a model that is elsewhere, is left to the container's validator.
    """
    if not _unified():
        return
    container = settings.read(service.environment)
    try:
        command = entrypoint.read_arguments(project["services"][SERVICE].get("command") or [])
    except UsageError:  # the container says so
        return
    profile = profiles.named(container.serve_profile, stack=container.stack)
    arguments = (*profile.arguments(), *container.arguments, *command.arguments)
    model, revision = command.model or container.model, flag_value(arguments, REVISION) or ""
    try:
        mounts = project["services"][SERVICE].get("volumes") or []
        here = {Path(mount["target"]): Path(mount["source"]) for mount in mounts if mount.get("type") == "bind"}
        folder = local.find_mounted(model, service.environment, here, revision)
    except (OSError, UnicodeError, StorageError) as error:  # the container's user may read it
        say(f"NOTE: {model} cannot be read here ({error}), so the container plans its memory, not this host")
        return
    if folder:
        environment = {**profile.variables(), **service.environment}
        judge(folder, arguments, environment)


def judge(model: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Raise RefusalError, with figures and the flags that make it fit, if the check of this machine fails.

    `environment` has the container's variables, such as the memory guard's bound.
    """
    target = Target(Options(model=model, serve_args=arguments, environ={**os.environ, **environment}), "")
    facts = gather(target, (machine.READINGS, checkpoint.READINGS))
    if any(facts[name].error or facts[name].value is None for name in ("model.weight_bytes", "model.config")):
        return
    finding = evaluate(CHECKS[CHECK], View(facts))
    if finding.status is Status.FAIL:
        failure = f"{local.name_of(model)} does not fit the memory that is free now"
        raise RefusalError(failure, finding.evidence, finding.fix, code="validation.too-large")


def _unified() -> bool:
    """Tell whether this machine's GPU shares the memory of its processor, as far as the plan's devices are known."""
    try:
        rows = [devices.by_gpu(row["name"]) for row in gpu.nvidia_smi(Target(Options(), ""))]
    except (ProbeError, KeyError):
        return False
    return any(row is not None and row.unified for row in rows)
