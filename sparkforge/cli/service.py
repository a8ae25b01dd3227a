"""Commands for our systemd unit: the service that starts a server at boot."""

from __future__ import annotations

import os
from pathlib import Path

from invoke.context import Context

from sparkforge.cli.build import build_image
from sparkforge.cli.command import caller_path, task, texts, with_fields
from sparkforge.cli.serve import ServeOptions, planned
from sparkforge.core.errors import UsageError

SYSTEM = "the system's service manager instead of your own; needs root (sudo)"
# The service's settings are read once, when its unit is written.
DECIDED_NOW = {"device": "as for up; `auto` is decided now, not at boot", "profile": "docker: a serve profile"}


@task(
    example="./inv service.install --device docker --profile safe --now",
    system=SYSTEM,
    user="with --system: the account that runs it; default: the owner of the checkout",
    now="start it too",
    show="print the unit and the file it would be written to, and change nothing",
    rest="vllm_flags",
    **(texts(ServeOptions) | DECIDED_NOW),
)
@with_fields(ServeOptions)
def install(
    _ctx: Context, options: ServeOptions, system: bool = False, user: str = "", now: bool = False, show: bool = False
) -> None:
    """Have systemd start the server at boot and after a crash.

    It writes and enables the unit sparkforge.service, which runs `./inv up`. Run it again to change the unit.
    """
    from sparkforge.core import paths
    from sparkforge.image.devices import CONTAINERS, stack_of
    from sparkforge.models import local
    from sparkforge.serve import service
    from sparkforge.serve.devices.choose import device_for
    from sparkforge.serve.unit import ServiceUnit

    service.version()  # raises ServerError without systemd
    named = options.model or os.environ.get("MODEL", "")
    if system and local.REPOSITORY.fullmatch(named) and not Path(caller_path(named)).is_dir():
        why = "with --system it would be looked up in root's cache of the hub, and the service runs as another account"
        fix = "--help   # name a folder of models/, which ./inv pull makes"
        raise UsageError(f"{named} is not a folder", why, fix)
    plan = planned(options)
    device_for(plan, build_image)  # which checks the plan
    stack_of(plan.device, plan.stack)
    stated = {
        "device": plan.device,
        "model": plan.model,
        "profile": plan.profile,
        "port": str(plan.port),
        "host": plan.host,
        "context": options.context,
        "api-key-file": plan.key_file or "",
        "allow-hosts": ",".join(plan.hosts),
        "stack": plan.stack,
        "python": plan.python,
    }
    arguments = tuple(f"--{name}={value}" for name, value in stated.items() if value)
    wanted = ServiceUnit(
        arguments=(*arguments, *(("--", *plan.flags) if plan.flags else ())),
        container=plan.device in CONTAINERS,
        places=tuple(dict.fromkeys([paths.state(), *([Path(plan.model)] if plan.model else [])])),
    )
    service.install(wanted, system=system, account=user, now=now, show=show)


@task(example="./inv service.remove", system=SYSTEM)
def remove(_ctx: Context, system: bool = False) -> None:
    """Stop the service and remove its unit.

    A unit that service.install did not write, or that was edited, stays.
    """
    from sparkforge.serve import service

    service.remove(system=system)
