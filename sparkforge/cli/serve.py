"""Commands that serve a model and use the server."""

from __future__ import annotations

import os

from invoke.context import Context

from sparkforge.cli.build import OFFLINE, build_image
from sparkforge.cli.command import caller_path, task, whole_number
from sparkforge.core.console import Steps, say

PORT = "8000"


@task(
    example="./inv up --device docker --profile fast",
    device="auto, embedded (vLLM's CPU build), docker, or docker-cpu (the container without a GPU)",
    model="folder of a gpt-oss checkpoint; default: a tiny one on devices without a GPU [MODEL]",
    profile="docker: a table of sparkforge/serve/profiles.toml, such as safe, fast or long-context",
    port="port on 127.0.0.1; default 8000 [PORT]",
    api_key_file="file with the API key that clients must send: one line, readable for you alone",
    allow_hosts="more names for the Host header, with commas: spark.local,localhost:9000",
    profiler="start it with vLLM's torch profiler, for ./inv bench.profile",
    foreground="stay, show the log, stop the server on Ctrl-C",
    stack="a stack of pins.toml; default: the device's",
    offline=OFFLINE,
)
def up(  # noqa: PLR0913, PLR0917 - a parameter an option
    _ctx: Context,
    device: str = "auto",
    model: str = "",
    profile: str = "",
    port: str = "",
    api_key_file: str | None = None,
    allow_hosts: str = "",
    profiler: bool = False,
    foreground: bool = False,
    stack: str = "",
    offline: str = "",
) -> None:
    """Prepare what is missing, validate it, and serve a model.

    The steps are environment, model, validation, server and first answers. MODEL, PORT, TP and MAX_MODEL_LEN are taken
    from the environment where no option says otherwise.
    """
    from sparkforge.environments import Environment
    from sparkforge.image.devices import DOCKER, stack_of
    from sparkforge.serve import container, embedded, environment, failure, launch, screen, settings
    from sparkforge.serve.device import choose
    from sparkforge.sources.offline import use_bundle

    with failure.remembered():
        use_bundle(caller_path(offline))
        number = whole_number("--port" if port else "PORT", port or os.environ.get("PORT") or PORT)
        named = os.environ.get("MODEL", "")
        model = caller_path(model) or settings.checkpoint(named, caller_path(named))
        key_file = caller_path(api_key_file) if api_key_file else api_key_file
        choice = choose(device)
        say(f"device: {choice.device}, because {choice.why}")
        with launch.starting():
            launch.check_free(number)
            served = stack_of(choice.device, stack)
            if choice.container:
                # Without --stack, `.env` may name one: that is for Compose to read.
                chosen = served if stack or choice.device != DOCKER else ""
                variables = container.variables(model, profile, number, key_file, allow_hosts, chosen, profiler)
                server = container.up(choice.device, variables, Steps(4), build_image)
            else:
                access = embedded.check(model, profile, key_file, allow_hosts)
                arguments = embedded.vllm_arguments(os.environ)
                steps = Steps(4)
                python = environment.prepare(steps, Environment(served)).python
                server = embedded.up(python, model, number, steps, access, profiled=profiler, arguments=arguments)
    screen.show_ready(server)
    if foreground:
        screen.stay(server)


@task(example="./inv down")
def down(_ctx: Context) -> None:
    """Stop the server and every process it started."""
    from sparkforge.serve import launch, screen

    screen.show_stopped(launch.stop())


@task(example="./inv status")
def status(_ctx: Context) -> None:
    """Print what is served, and whether it is healthy.

    The requests that its start proved are shown too.
    """
    from sparkforge.serve import record, screen

    screen.show_status(record.running())


@task(example="./inv logs -f", follow="continue as the log grows")
def logs(_ctx: Context, follow: bool = False) -> None:
    """Print the server's log."""
    from sparkforge.serve import screen

    screen.show_log(follow=follow)


@task(example='./inv chat "What is a kernel?"', message="your message", max_tokens="longest answer")
def chat(_ctx: Context, message: str, max_tokens: str = "64") -> None:
    """Send a message to the model and print its answer."""
    from sparkforge.serve import record, screen

    limit = whole_number("--max-tokens", max_tokens)
    screen.show_chat(record.running(), message, limit)


@task(example="./inv shell")
def shell(_ctx: Context) -> None:
    """Open a shell in the server's container or environment."""
    from sparkforge.serve import record, screen

    screen.shell(record.running())
