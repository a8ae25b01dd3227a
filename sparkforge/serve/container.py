"""Serve in a container: engine, image, Compose, the container's own validation, the start's proof."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import docker

from sparkforge.core import paths
from sparkforge.core.bounded import ProbeError
from sparkforge.core.console import Steps, say
from sparkforge.core.docker import require_plugin
from sparkforge.core.errors import EngineError, RefusalError, ServerError, SparkforgeError, UsageError
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine
from sparkforge.image.compose import SERVICE, Service
from sparkforge.image.devices import build_command
from sparkforge.image.engine import Engine, State
from sparkforge.serve import access, launch, logs, profiler, profiles, proof, record, settings
from sparkforge.serve import client as api
from sparkforge.serve.command_line import served_name
from sparkforge.serve.record import Server
from validate.facts import gpu
from validate.facts.target import Options, Target

# 65 GB of weights from a disk, and 15 to 25 minutes of compiling if no kernel is cached (docs/reference/checks.md).
READY_SECONDS = 3600.0
TAIL = 400  # lines of the container's log that are read
REFUSED = RefusalError.exit_code
REFUSAL = "the validator refuses to serve"  # printed by sparkforge/serve/entrypoint.py
LEAK = (
    "WARNING: before version 28, Docker (here {version}) lets other machines of the same layer-2 network reach ports\n"
    "that are published on 127.0.0.1. Update Docker, or drop such packets in a firewall{key}."
)
ImageBuilder = Callable[[str, Steps], None]


def variables(
    model: str,
    profile: str,
    port: int,
    key_file: str | None = None,
    allow_hosts: str = "",
    stack: str = "",
    profiled: bool = False,
) -> dict[str, str]:
    """Return what the Compose files read from the environment. Raises UsageError or InputError for a wrong argument.

    An empty argument leaves the files' own default. A `profiled` server has vLLM's torch profiler.
    """
    environment = {"PORT": str(port), **docker_compose.variables(stack)}
    if path := access.key_path(key_file):
        environment["SPARKFORGE_API_KEY"] = str(path)
    if allow_hosts:
        environment[access.HOSTS] = ",".join(access.named_hosts(allow_hosts))
    if profiled:
        environment[profiler.VARIABLE] = profiler.IN_CONTAINER
    if profile:
        profiles.named(profile, stack=stack)
        environment["SPARKFORGE_SERVE_PROFILE"] = profile
    if model:
        folder = paths.typed(model).absolute()
        served_name(folder)
        environment |= {"SPARKFORGE_MODELS": str(folder.parent), "SPARKFORGE_MODEL_NAME": folder.name}
        environment["SPARKFORGE_MODEL"] = f"/models/{folder.name}"  # of the stacks whose default is no folder
    settings.arguments(os.environ)  # Compose passes TP and MAX_MODEL_LEN on; a wrong one must not cost a start
    _require_gpus(int(os.environ.get("TP") or 1))
    return environment


def _require_gpus(wanted: int) -> None:
    """Raise UsageError if this machine has fewer GPUs than are to share the model, and says so."""
    try:
        present = len(gpu.nvidia_smi(Target(Options(), "embedded"))) if wanted > 1 else wanted
    except ProbeError:
        return  # without a GPU at all the engine says what is missing
    if present < wanted:
        why = f"it is the number of GPUs that share the model, and nvidia-smi lists {present}"
        raise UsageError(f"TP={wanted} is too many", why, f"TP={present} ./inv up")


def up(device: str, env: Mapping[str, str], steps: Steps, build: ImageBuilder) -> Server:
    """Start the container and return the serving server; `build(stack, steps)` makes a missing image.

    `env` are the variables that the Compose files read. Raises an engine's error, RefusalError with what the
    container's validator found, or ServerError; whenever it raises, the container is stopped, not removed.
    """
    with steps.step("engine", "docker") as tell:
        docker_engine, service = _check_engine(), docker_compose.resolve(env)
        if service.gpus:
            _require_gpu(docker_engine)
        gpu = f", {docker_engine.gpu}" if service.gpus else ""
        tell(f"Docker {docker_engine.version} on {docker_engine.platform}{gpu}")
    if service.key_file:
        access.read_key(Path(service.key_file), private=False)  # before minutes go into an image
    if docker_engine.leaks_loopback_ports and service.host == launch.LOOPBACK:
        key = "" if service.key_file else "; or start with --api-key-file FILE"
        say(LEAK.format(version=docker_engine.version, key=key))
    launch.check_free(service.port, service.host)
    with steps.step("image", service.image) as tell:
        try:
            image_id = _image_id(service, docker_engine)
        except EngineError as error:
            if error.code != "engine.image":
                raise
            build(service.stack, steps)
            image_id = _image_id(service, docker_engine)
        tell(image_id)
    with steps.step("container") as tell:
        return _start(device, env, service, tell)


def health(server: Server) -> str:
    """Return the container's state according to its own health check, in words."""
    with engine.connected() as client:
        state = engine.state(client, server.container)
    if state is None:
        return "gone"
    output = f" ({state.health_output})" if state.health_output and state.health != "healthy" else ""
    return f"{state.health or state.status}{output}"


def _check_engine() -> Engine:
    """Return the engine. Raises EngineError if it lacks Compose."""
    with engine.connected() as client:
        docker_engine = engine.read(client)
    require_plugin("compose")
    return docker_engine


def _require_gpu(docker_engine: Engine) -> None:
    """Raise EngineError if the engine cannot give a container the GPU."""
    try:
        docker_engine.require_gpu()
    except EngineError as error:
        fix = f"{error.fix}; without a GPU: ./inv up --device docker-cpu"
        raise EngineError(error.what, error.why, fix, code="engine.gpu") from error


def _image_id(service: Service, docker_engine: Engine) -> str:
    with engine.connected() as client:
        command = build_command(service.stack)
        return str(engine.require_image(client, service.image, docker_engine.platform, command).short_id)


def _start(device: str, env: Mapping[str, str], service: Service, tell: Callable[[str], None]) -> Server:
    try:
        docker_compose.up(env, paths.state() / "logs" / "compose.log", tell)
        with engine.connected() as client:
            container = _find_container(client)
            container_settings = settings.read(service.environment)
            server = Server(
                pid=0,
                started=0.0,
                host=service.host,
                port=service.port,
                model=container_settings.model,
                model_id=container_settings.model_id,
                device=device,
                log="",
                container=container,
                key_file=service.key_file,
            )
            record.write(server)
            server = _wait(client, server, tell)
    except BaseException:  # also Ctrl-C: a server that nobody waits for must not stay
        record.forget()
        with suppress(SparkforgeError):  # the first error is the one to report
            docker_compose.stop(env)
        raise
    tell(f"first token received, {proof.in_words(server.proof)}")
    return server


def _find_container(client: docker.DockerClient) -> str:
    container = engine.service_container(client, docker_compose.project(), SERVICE)
    if container is None:
        fix = "docker compose ps --all"
        raise ServerError("there is no container", "Compose started none", fix, code="server.start")
    return container


def _wait(client: docker.DockerClient, server: Server, tell: Callable[[str], None]) -> Server:
    """Wait until the container is healthy and has proved what clients call; return the record with that."""

    def is_healthy() -> bool:
        """Return what the container's own health check says; raise if it cannot get healthy any more."""
        state = engine.state(client, server.container)
        _require_alive(client, server, state)
        if state and state.health == "healthy":
            return True
        text = log_text(client, server.container)
        tell(logs.milestone(text) or ("validating" if "validate ·" in text else "starting"))
        return False

    deadline = time.monotonic() + READY_SECONDS
    if not api.wait_until_healthy(is_healthy, deadline):
        raise _failure(client, server, "the container did not get healthy in time")
    try:
        return launch.proved(server, READY_SECONDS, server.key)
    except ServerError as error:
        problem = f"the container is healthy but cannot generate ({error.why})"
        raise _failure(client, server, problem) from error


def _require_alive(client: docker.DockerClient, server: Server, state: State | None) -> None:
    """Raise if the container is gone, ended, was refused by its validator, or is unhealthy."""
    if state is None:
        fix = "./inv up --device docker"
        raise ServerError("the container is gone", "somebody removed it", fix, code="server.start")
    if state.status in {"exited", "dead", "restarting"} or state.restarts:
        raise _end_of(client, server, state)
    if state.health == "unhealthy":
        raise _failure(client, server, f"the container is unhealthy: {state.health_output}")


def _end_of(client: docker.DockerClient, server: Server, state: State) -> SparkforgeError:
    """Return the error for a container whose program ended, perhaps to be started again by Docker."""
    text = log_text(client, server.container)
    if state.exit_code == REFUSED or REFUSAL in text:
        return _refusal(text, server)
    if state.out_of_memory:
        return _failure(client, server, "the kernel killed the container's server: its memory limit was reached")
    if state.restarts:
        return _failure(client, server, "the container's server ended by itself, and Docker started it again")
    return _failure(client, server, f"the container ended with code {state.exit_code}")


def _refusal(text: str, server: Server) -> RefusalError:
    """Return the error for a container whose validator refused, from its log."""
    lines = [line.strip() for line in text.splitlines()]
    failures = list(dict.fromkeys(line for line in lines if line.startswith("FAIL ")))
    fixes = [line.removeprefix("next:").strip() for line in lines if line.startswith("next:")]
    why = "\n        ".join(failures) or "its log does not say why"
    fix = f"{fixes[0]}; then ./inv up --device {server.device}" if fixes else f"docker logs {server.container[:12]}"
    return RefusalError("the validator in the container refuses to serve", why, fix, code="validation.failed")


def _failure(client: docker.DockerClient, server: Server, failure: str) -> SparkforgeError:
    lines = logs.explain(log_text(client, server.container)) or ["its log is empty"]
    fix = f"./inv doctor   # the whole log: docker logs {server.container[:12]}"
    return ServerError(failure, "\n        ".join(lines), fix, code="server.start")


def log_text(client: docker.DockerClient, container: str) -> str:
    """Return the last lines of a container's log, stdout and stderr together."""
    return str(client.containers.get(container).logs(tail=TAIL).decode(errors="replace"))
