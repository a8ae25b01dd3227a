"""Start a server on any device: what `./inv up` and a bake-off have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkforge.core.console import Steps
from sparkforge.environments import Environment
from sparkforge.image.devices import DOCKER, DOCKER_CPU, stack_of
from sparkforge.serve import container, embedded, environment, launch, passed
from sparkforge.serve.container import ImageBuilder
from sparkforge.serve.record import Server


@dataclass(frozen=True)
class StartRequest:
    """What to start. `device` is a chosen one; `host` is an address, empty for loopback; `flags` are vLLM's own.

    `variables` are the environment with --context in MAX_MODEL_LEN. A `trial` ends with this process where it is no
    container, and is never recorded as known good.
    """

    device: str
    model: str = ""
    profile: str = ""
    port: int = 8000
    host: str = ""
    key_file: str | None = None
    allow_hosts: str = ""
    profiler: bool = False
    stack: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    trial: bool = False


def start(request: StartRequest, build: ImageBuilder) -> Server:
    """Prepare what is missing, start the server and return it once it has proved itself.

    `build(stack, steps)` makes a missing image. Raises what the device raises; nothing is left running then.
    """
    with launch.starting():
        launch.check_free(request.port, request.host or launch.LOOPBACK)
        if request.device in {DOCKER, DOCKER_CPU}:
            return container.up(request.device, compose_variables(request), Steps(4), build, trial=request.trial)
        return _embedded(request)


def compose_variables(request: StartRequest) -> dict[str, str]:
    """Return what the Compose files read from the environment for a request. Raises UsageError, InputError."""
    stack = stack_of(request.device, request.stack)
    # Without --stack, `.env` may name one: that is for Compose to read.
    chosen = stack if request.stack or request.device != DOCKER else ""
    variables = container.variables(
        request.model,
        request.profile,
        request.port,
        request.key_file,
        request.allow_hosts,
        chosen,
        request.profiler,
    )
    further = container.passed_on(request.variables, request.host, request.port, request.allow_hosts, request.flags)
    return {**variables, **further}


def _embedded(request: StartRequest) -> Server:
    access = embedded.check(request.model, request.profile, request.key_file, request.allow_hosts)
    passed.say_replaced(request.flags, embedded.profile_named(request.profile))
    steps = Steps(4)
    return embedded.up(
        environment.prepare(steps, Environment(stack_of(request.device, request.stack))).python,
        request.model,
        request.port,
        steps,
        access,
        profiled=request.profiler,
        arguments=(*embedded.vllm_arguments(request.variables), *request.flags),
        host=request.host or launch.LOOPBACK,
        profile=request.profile,
        trial=request.trial,
    )
