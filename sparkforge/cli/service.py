"""Commands for our systemd units: the service that starts a server at boot, and the machine's memory guard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from invoke.context import Context

from sparkforge.cli.command import caller_path, task, whole_number
from sparkforge.cli.serve import PORT
from sparkforge.core.errors import UsageError

SYSTEM = "the system's service manager instead of your own; needs root (sudo)"


@task(
    example="./inv service.install --device docker --profile safe --now",
    system=SYSTEM,
    user="with --system: the account that runs it; default: who owns the checkout",
    device="as for up; `auto` is decided now, not at boot",
    model="folder of a gpt-oss checkpoint; default: as for up [MODEL]",
    profile="docker: a serve profile",
    port="port on 127.0.0.1; default 8000 [PORT]",
    host="IP address to listen on; default 127.0.0.1; one that other machines reach needs --api-key-file",
    context="longest sequence in tokens, prompt and answer; default: the profile's [MAX_MODEL_LEN]",
    api_key_file="file with the API key that clients must send",
    allow_hosts="more names for the Host header, with commas",
    stack="a stack of pins.toml; default: the device's",
    now="start it too",
    show="print the unit and the file it would be written to, and change nothing",
    rest="vllm_flags",
    vllm_flags="vLLM's own flags, as for up",
)
def install(  # noqa: PLR0913, PLR0917 - a parameter an option
    _ctx: Context,
    system: bool = False,
    user: str = "",
    device: str = "auto",
    model: str = "",
    profile: str = "",
    port: str = "",
    host: str = "",
    context: str = "",
    api_key_file: str | None = None,
    allow_hosts: str = "",
    stack: str = "",
    now: bool = False,
    show: bool = False,
    vllm_flags: Sequence[str] = (),
) -> None:
    """Have systemd start the server at boot and after a crash.

    It writes and enables the unit sparkforge.service, which runs `./inv up`. The same command again changes it.
    """
    from sparkforge.core import paths
    from sparkforge.core.console import say
    from sparkforge.image.devices import stack_of
    from sparkforge.serve import container, embedded, passed, service, settings
    from sparkforge.serve.device import choose

    service.version()  # without systemd nothing else matters
    number = whole_number("--port" if port else "PORT", port or os.environ.get("PORT") or PORT)
    named = os.environ.get("MODEL", "")
    model = caller_path(model) or settings.checkpoint(named, caller_path(named))
    key_file = caller_path(api_key_file) if api_key_file else api_key_file
    address = passed.address(host, key_file)
    variables = passed.with_context(os.environ, context, vllm_flags)
    choice = choose(device)
    flags = passed.checked(vllm_flags, relative_to=None if choice.container else caller_path("."))
    say(f"device: {choice.device}, because {choice.why}")
    if choice.container:
        container.variables(model, profile, number, key_file, allow_hosts, stack)
        container.passed_on(variables, host and address, number, allow_hosts, flags)
    else:
        embedded.check(model, profile, key_file, allow_hosts)
        embedded.vllm_arguments(variables)
    stack_of(choice.device, stack)
    options = {
        "device": choice.device,
        "model": model,
        "profile": profile,
        "port": str(number),
        "host": host and address,
        "context": context,
        "api-key-file": key_file or "",
        "allow-hosts": allow_hosts,
        "stack": stack,
    }
    service.install(
        (*(f"--{name}={value}" for name, value in options.items() if value), *(("--", *flags) if flags else ())),
        system=system,
        account=user,
        container=choice.container,
        places=tuple(dict.fromkeys(filter(None, (paths.state(), Path(model) if model else None)))),
        now=now,
        show=show,
    )


@task(example="./inv service.remove", system=SYSTEM)
def remove(_ctx: Context, system: bool = False) -> None:
    """Stop the service and remove its unit.

    A unit that service.install did not write, or that was edited, stays.
    """
    from sparkforge.serve import service

    service.remove(system=system)


@task(example="./inv service.status", system=SYSTEM)
def status(_ctx: Context, system: bool = False) -> None:
    """Print the service's state, its last failure and its next start."""
    from sparkforge.serve import service

    service.show(system=system)


@task(
    example="./inv service.guard --show",
    install="write, enable and start its unit; needs root",
    remove="stop it and remove its unit; needs root",
    show="print the unit and the file it would be written to, and change nothing",
)
def guard(_ctx: Context, install: bool = False, remove: bool = False, show: bool = False) -> None:
    """Show, install or remove the machine's memory guard.

    The unit sparkforge-guard.service watches the whole machine, and ends servers, in containers too, before there is no
    memory left. Without an option: its state, what it did last, and the memory that is left.
    """
    from sparkforge.serve import service

    if install + remove + show > 1:
        raise UsageError("--install, --remove and --show are three things", "one is done at a time", "choose one")
    if show or install:
        service.install_guard(show=show)
    elif remove:
        service.remove_guard()
    else:
        service.show_guard()
