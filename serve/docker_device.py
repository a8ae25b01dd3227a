"""Serve in a container: engine, image, Compose, the container's own validation, first token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import docker

from serve import client, docker_compose, engine, launch, logs, profiles, record, settings
from serve.device import DOCKER
from serve.docker_compose import SERVICE, Service
from serve.embedded import model_name
from serve.engine import Engine, State
from serve.record import Server
from sparkforge import paths
from sparkforge.console import Steps
from sparkforge.docker_cli import require_plugin
from sparkforge.errors import (
    GpuRuntimeError,
    ImageMissingError,
    ServerReplyError,
    SparkforgeError,
    StartFailedError,
    ValidationFailedError,
)
from sparkforge.files import locked

BUILD = {True: "./inv build --engine docker-cpu", False: "./inv build --engine docker"}
# 65 GB of weights from a disk, and 15 to 25 minutes of compiling if no kernel is cached (docs/validation.md).
READY_SECONDS = 3600.0
POLL_SECONDS = 0.5
TAIL = 400  # lines of the container's log that are looked at
REFUSED = ValidationFailedError.exit_code
REFUSAL = "the validator refuses to serve"  # serve/entrypoint.py's words
BUILT = Callable[[str, Steps], None]


def variables(model: str, profile: str, port: int) -> dict[str, str]:
    """Return what the Compose files read from the environment. Raises UsageError or ModelError for a wrong word.

    An empty `model` or `profile` leaves the files' own default.
    """
    found = {"PORT": str(port)}
    if profile:
        found["SPARKFORGE_SERVE_PROFILE"] = profiles.named(profile).name
    if model:
        folder = paths.typed(model).absolute()
        model_name(folder)
        found |= {"SPARKFORGE_MODELS": str(folder.parent), "SPARKFORGE_MODEL_NAME": folder.name}
        found["SPARKFORGE_MODEL"] = f"/models/{folder.name}"  # docker-cpu, whose default is no folder
    return found


def up(device: str, env: Mapping[str, str], steps: Steps, build: BUILT) -> Server:
    """Bring the container up and return the serving server; `build(device, steps)` makes a missing image.

    `env` are the variables that the Compose files read. Raises an engine's error, ValidationFailedError with what the
    container's validator found, or StartFailedError; whenever it raises, the container is stopped, not removed.
    """
    with steps.step("engine", "docker") as tell:
        service, found = _look(device, env)
        tell(f"Docker {found.version} on {found.platform}" + (f", {found.gpu}" if not service.cpu else ""))
    launch.check_free(service.port, service.host)
    with steps.step("image", service.image) as tell:
        tell(_image(device, service, found, steps, build))
    with locked(paths.state() / "serve.lock", "start a server"), steps.step("container") as tell:
        return _start(device, env, service, tell)


def stop(server: Server) -> None:
    """Remove the server's container and forget it."""
    docker_compose.down(server.device, {})
    record.forget()


def health(server: Server) -> str:
    """Say how the container is, by its own health check."""
    with engine.connected() as connected:
        found = engine.state(connected, server.container)
    if found is None:
        return "gone"
    return f"{found.health or found.status}" + (f" ({found.said})" if found.said and found.health != "healthy" else "")


def _look(device: str, env: Mapping[str, str]) -> tuple[Service, Engine]:
    with engine.connected() as connected:
        found = engine.read(connected)
    require_plugin("compose")
    if device == DOCKER:
        try:
            found.require_gpu()
        except GpuRuntimeError as error:
            fix = f"{error.fix}; without a GPU: ./inv up --device docker-cpu"
            raise GpuRuntimeError(error.what, error.why, fix) from error
    return docker_compose.resolve(device, env), found


def _image(device: str, service: Service, found: Engine, steps: Steps, build: BUILT) -> str:
    """Return the image's id; build it first if there is none."""
    how = BUILD[service.cpu]
    try:
        with engine.connected() as connected:
            return str(engine.require_image(connected, service.image, found.platform, how).short_id)
    except ImageMissingError:
        build(device, steps)
    with engine.connected() as connected:
        return str(engine.require_image(connected, service.image, found.platform, how).short_id)


def _start(device: str, env: Mapping[str, str], service: Service, tell: Callable[[str], None]) -> Server:
    try:
        docker_compose.up(device, env, paths.state() / "logs" / "compose.log", tell)
        with engine.connected() as connected:
            server = _server(device, service, _container(connected))
            record.write(server)
            _wait(connected, server, tell)
    except BaseException:  # also Ctrl-C: a server that nobody waits for must not stay
        record.forget()
        with suppress(SparkforgeError):  # what went wrong first is what to tell
            docker_compose.stop(device, env)
        raise
    tell("first token received")
    return server


def _container(connected: docker.DockerClient) -> str:
    found = engine.service_container(connected, docker_compose.project(), SERVICE)
    if found is None:
        raise StartFailedError("there is no container", "Compose started none", "docker compose ps --all")
    return found


def _server(device: str, service: Service, container: str) -> Server:
    told = settings.read(service.environment)
    return Server(
        pid=0,
        started=0.0,
        host=service.host,
        port=service.port,
        model=told.model,
        model_id=told.model_id,
        device=device,
        log="",
        container=container,
        key_file=service.key_file,
    )


def _wait(connected: docker.DockerClient, server: Server, tell: Callable[[str], None]) -> None:
    """Wait until the container is healthy and has given a token."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        found = engine.state(connected, server.container)
        _refuse_ended(connected, server, found)
        if found and found.health == "healthy":
            _first_token(connected, server)
            return
        text = log_text(connected, server.container)
        tell(logs.reached_in(text) or ("validating" if "validate ·" in text else "starting"))
        time.sleep(POLL_SECONDS)
    raise _failed(connected, server, "the container did not get healthy in time")


def _first_token(connected: docker.DockerClient, server: Server) -> None:
    try:
        client.first_token(server.url, server.model_id, READY_SECONDS, server.key)
    except ServerReplyError as error:
        raise _failed(connected, server, f"the container is healthy but cannot generate ({error.why})") from error


def _refuse_ended(connected: docker.DockerClient, server: Server, found: State | None) -> None:
    """Raise if the container is gone, ended, was refused by its validator, or is unhealthy."""
    if found is None:
        raise StartFailedError("the container is gone", "somebody removed it", "./inv up --device docker")
    if found.status in {"exited", "dead", "restarting"} or found.restarts:
        raise _end(connected, server, found)
    if found.health == "unhealthy":
        raise _failed(connected, server, f"the container is unhealthy: {found.said}")


def _end(connected: docker.DockerClient, server: Server, found: State) -> SparkforgeError:
    """Make the error of a container whose program ended, perhaps to be started again by Docker."""
    text = log_text(connected, server.container)
    if found.exit_code == REFUSED or REFUSAL in text:
        return _refused(text, server)
    if found.out_of_memory:
        what = "the kernel killed the container's server: its memory limit was reached"
    elif found.restarts:
        what = "the container's server ended by itself, and Docker started it again"
    else:
        what = f"the container ended with code {found.exit_code}"
    return _failed(connected, server, what)


def _refused(text: str, server: Server) -> ValidationFailedError:
    """Make the error of a container whose validator refused, from its log."""
    lines = [line.strip() for line in text.splitlines()]
    found = list(dict.fromkeys(line for line in lines if line.startswith("FAIL ")))
    fixes = [line.removeprefix("next:").strip() for line in lines if line.startswith("next:")]
    why = "\n        ".join(found) or "its log does not say why"
    fix = f"{fixes[0]}; then ./inv up --device {server.device}" if fixes else f"docker logs {server.container[:12]}"
    return ValidationFailedError("the validator in the container refuses to serve", why, fix)


def _failed(connected: docker.DockerClient, server: Server, what: str) -> SparkforgeError:
    lines = logs.telling(log_text(connected, server.container)) or ["its log is empty"]
    fix = f"./inv doctor   # the whole log: docker logs {server.container[:12]}"
    return StartFailedError(what, "\n        ".join(lines), fix)


def log_text(connected: docker.DockerClient, container: str) -> str:
    """Return the last lines of a container's log, stdout and stderr together."""
    return str(connected.containers.get(container).logs(tail=TAIL).decode(errors="replace"))
