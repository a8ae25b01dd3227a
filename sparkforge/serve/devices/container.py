"""Serve in a container: engine, image, Compose, the container's own validation, the start's proof."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import docker

from sparkforge.core import openai, paths
from sparkforge.core.console import Steps, say
from sparkforge.core.docker import require_plugin
from sparkforge.core.errors import EngineError, RefusalError, ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_atomic
from sparkforge.core.process import ProbeError
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine, inspect, versions
from sparkforge.image.compose import SERVICE, Service
from sparkforge.image.devices import DOCKER, build_command, stack_of
from sparkforge.image.engine import Engine, State
from sparkforge.models import local
from sparkforge.serve import (
    access,
    known_good,
    launch,
    logs,
    memory_plan,
    profiler,
    profiles,
    proof,
    record,
    settings,
)
from sparkforge.serve import health as container_health
from sparkforge.serve.command_line import served_name
from sparkforge.serve.devices.device import Device
from sparkforge.serve.plan import LOOPBACK, StartPlan
from sparkforge.serve.record import Server
from sparkforge.serve.restarts import TOO_OFTEN
from validate.facts import gpu
from validate.facts.target import Options, Target

# 65 GB of weights from a disk, and 15 to 25 minutes of compiling if no kernel is cached (docs/reference/checks.md).
READY_SECONDS = 3600.0
CACHE = "/var/cache/sparkforge"  # where the image has its volume; a folder of compiled code an image (deploy/start)
LOG_LINES = 400  # of the container's log, that are read
BIND, FLAGS = access.BIND, settings.VLLM_ARGS  # Compose's variables: the address to publish on, flags for vLLM
KERNEL_PAGE = "docs/guide/tune.md, your own kernel"
REFUSED = RefusalError.exit_code
REFUSAL = "the validator refuses to serve"  # printed by sparkforge/serve/entrypoint.py
LEAK = (
    "WARNING: before version 28, Docker (here {version}) lets other machines of the same layer-2 network reach ports\n"
    "that are published on 127.0.0.1. Update Docker, or drop such packets in a firewall{key}."
)
ImageBuilder = Callable[[str, Steps], None]


class Container(Device):
    """The vllm service of our Compose files; `build(stack, steps)` makes a missing image.

    The constructor raises UsageError or InputError if the plan or a SPARKFORGE_* variable is wrong.
    """

    compose_files: tuple[str, ...] = ()  # further files of the checkout, read after docker-compose.yml
    service: Service
    project: Mapping[str, Any]

    def __init__(self, plan: StartPlan, build: ImageBuilder) -> None:
        super().__init__(plan)
        self.build, self.env = build, variables(plan)

    def prepare(self) -> None:
        """Read the engine and the Compose files, refuse what the container would refuse, and build a missing image."""
        with self.steps.step("engine", "docker") as tell:
            with engine.connected() as client:
                docker_engine = engine.read(client)
            require_plugin("compose")
            self.project = docker_compose.resolved(self.env)
            service = self.service = docker_compose.service_of(self.project)
            if service.gpus:
                _require_gpu(docker_engine)
            gpus = f", {docker_engine.gpu}" if service.gpus else ""
            tell(f"Docker {docker_engine.version} on {docker_engine.platform}{gpus}")
        _require_passed_on(service, self.env)
        settings.read(service.environment)  # what the container would refuse must not cost an image and a start
        access.require_key(service.host, service.key_file)
        if service.key_file:
            access.read_key(Path(service.key_file), private=False)  # before minutes go into an image
        if docker_engine.leaks_loopback_ports and service.host == LOOPBACK:
            key = "" if service.key_file else "; or start with --api-key-file FILE"
            say(LEAK.format(version=docker_engine.version, key=key))
        launch.check_free(service.port, service.host)
        if service.gpus:
            memory_plan.require_room(service, self.project)
        with self.steps.step("image", service.image) as tell:
            try:
                image_id = _image_id(service, docker_engine)
            except EngineError as error:
                if error.code != "engine.image":
                    raise
                self.build(service.stack, self.steps)
                image_id = _image_id(service, docker_engine)
            tell(image_id)

    def validate(self) -> str:
        """Leave it to the container, which validates itself before it serves: only it has the packages and the GPU."""
        return "the container validates itself"

    def start(self) -> Server:
        """Start the container; whenever it raises, the container is stopped, not removed."""
        with self.steps.step("container") as tell:
            return self.serve(tell)

    def serve(self, tell: Callable[[str], None], file: Path | None = None) -> Server:
        """Start the service, by the resolved project in `file` if there is one; return it once it proved itself."""
        service, inside = self.service, settings.read(self.service.environment)
        try:
            paths.secure_state()
            write_atomic(record.begun_path(), f"{docker_compose.project()}\n")
            log = paths.state() / "logs" / "compose.log"
            docker_compose.up(self.env, log, tell, file, more=self.compose_files)
            with engine.connected() as client:
                container = _find_container(client)
                server = Server(
                    pid=0,
                    started=_log_begin(client, container),
                    host=service.host,
                    port=service.port,
                    model=inside.model,
                    model_id=inside.model_id,
                    device=self.plan.device,
                    log="",
                    container=container,
                    key_file=service.key_file,
                    profile=inside.serve_profile,
                )
                record.write(server)
                record.begun_path().unlink()
                server = _wait(client, server, service.stack, tell)
        except BaseException as error:  # a server that nobody waits for must not stay; its log does if it failed
            with suppress(SparkforgeError):  # the first error is the one to report
                (docker_compose.down if isinstance(error, KeyboardInterrupt) else docker_compose.stop)(self.env)
                record.begun_path().unlink(missing_ok=True)
                record.forget()  # not before: where the engine does not answer, `./inv down` must still find it
            raise
        tell(f"first answers received, {proof.describe(server.proof)}, in {server.proof_seconds:.1f} s")
        return server

    def remember(self, server: Server) -> None:
        """Record the start with its image, which gets its own name, and its folder of compiled code."""
        if self.service.environment.get("SPARKFORGE_VALIDATE", settings.STRICT) != settings.STRICT:
            say("this start is not recorded as known good: its validation could not refuse it (SPARKFORGE_VALIDATE)")
            return
        project = {
            key: self.project[key] for key in ("name", "networks", "volumes", "secrets") if self.project.get(key)
        }
        service = self.project["services"][SERVICE].items()
        own = {key: value for key, value in service if key not in {"build", "depends_on"}}
        try:
            with engine.connected() as client:
                container = client.containers.get(server.container)
                image = client.images.get(container.attrs["Image"])
                manifest = inspect.manifest(client, image)
                name = versions.give_own_name(client, image, versions.split(self.service.image)[0], manifest)
            volumes = {mount["Destination"]: mount.get("Name", "") for mount in container.attrs.get("Mounts") or []}
            entry = known_good.started(
                server,
                self.service.stack,
                image=image.id,
                name=name,
                digests=list(image.attrs.get("RepoDigests") or []),
                cache=str(manifest.get("key", "")),
                volume=volumes.get(CACHE, ""),
                project=known_good.without_secrets({**project, "services": {SERVICE: own}}),
            )
        except (SparkforgeError, KeyError) as error:
            known_good.say_unrecorded(error)
            return
        known_good.remember(entry)


def variables(plan: StartPlan) -> dict[str, str]:
    """Return what the Compose files read from the environment; an empty part of the plan leaves the files' default.

    Raises UsageError or InputError for what is wrong in the plan or in the environment.
    """
    stack = stack_of(plan.device, plan.stack)
    # Without --stack, `.env` may name one: that is for Compose to read.
    chosen = stack if plan.stack or plan.device != DOCKER else ""
    environment = {"PORT": str(plan.port), **docker_compose.variables(chosen)}
    if path := access.key_path(plan.key_file):
        environment[docker_compose.KEY_VARIABLE] = str(path)
    names = access.named_hosts(",".join(plan.hosts))
    if names or plan.host:
        own = access.served_hosts(plan.host, plan.port, names) if plan.host else ()
        environment[access.HOSTS] = ",".join((*own, *names))
    if plan.profiled:
        environment[profiler.VARIABLE] = profiler.IN_CONTAINER
    if plan.profile:
        profiles.named(plan.profile, stack=chosen)
        environment["SPARKFORGE_SERVE_PROFILE"] = plan.profile
    if plan.model:
        folder = paths.typed(plan.model).absolute()
        served_name(folder)
        if cache := local.hub_cache_of(folder):  # a snapshot's files are links to elsewhere in the cache
            mounted = local.MOUNTED / "hub" / folder.relative_to(cache)
            environment |= {"HF_HUB_CACHE": str(cache), "SPARKFORGE_MODEL": str(mounted)}
        else:
            environment |= {"SPARKFORGE_MODELS": str(folder.parent), "SPARKFORGE_MODEL": f"/models/{folder.name}"}
    settings.arguments(os.environ)  # Compose passes TP and MAX_MODEL_LEN on; a wrong one must not cost a start
    settings.arguments(plan.variables)
    settings.require_guard(os.environ)
    _require_gpus(int(os.environ.get("TP") or 1))
    length = plan.variables.get(settings.CONTEXT_VARIABLE, "")
    further = {settings.CONTEXT_VARIABLE: length, BIND: plan.host, FLAGS: shlex.join(plan.flags)}
    return {**environment, **{name: value for name, value in further.items() if value}}


def _require_passed_on(service: Service, env: Mapping[str, str]) -> None:
    """Raise UsageError if the Compose files, which may be a user's own, leave out what was asked for."""
    fix = f"compare your files ({docker_compose.MORE}) with docker-compose.yml of this checkout"
    if (host := env.get(BIND)) and host != service.host:
        raise UsageError(f"--host {host} has no effect", f"the Compose files publish on {service.host}", fix)
    profile, served = env.get("SPARKFORGE_SERVE_PROFILE"), service.environment.get("SPARKFORGE_SERVE_PROFILE", "")
    if profile and profile != served:
        raise UsageError(f"--profile {profile} has no effect", f"the Compose files serve {served or 'none'}", fix)
    passed_values = [value.replace("$$", "$") for value in service.environment.values()]  # as `config` escapes them
    if (kernel := os.environ.get(profiles.KERNEL_VARIABLE)) and kernel != service.environment.get(
        profiles.KERNEL_VARIABLE
    ):
        why = (
            "the Compose files do not pass it on; a container has neither the shell's variables nor the kernel's files"
        )
        own = f"write it into vllm.env and mount its folder ({KERNEL_PAGE}), or: ./inv up --device embedded"
        raise UsageError(f"{profiles.KERNEL_VARIABLE}={kernel} has no effect", why, f"unset it, or {own}")
    if (flags := env.get(FLAGS)) and flags not in passed_values:
        raise UsageError(f"the flags {flags} have no effect", f"the Compose files do not pass {FLAGS} on", fix)


def _require_gpus(wanted: int) -> None:
    """Raise UsageError if this machine has fewer GPUs than are to share the model, and says so."""
    try:
        present = len(gpu.nvidia_smi(Target(Options(), ""))) if wanted > 1 else wanted
    except ProbeError:
        return  # without a GPU at all the engine says what is missing
    if present < wanted:
        why = f"it is the number of GPUs that share the model, and nvidia-smi lists {present}"
        raise UsageError(f"TP={wanted} is too many", why, f"TP={present} ./inv up")


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


def _find_container(client: docker.DockerClient) -> str:
    container = engine.service_container(client, docker_compose.project(), SERVICE)
    if container is None:
        fix = docker_compose.typed("ps", "--all")
        raise ServerError("there is no container", "Compose started none", fix, code="server.start")
    return container


def _log_begin(client: docker.DockerClient, container: str) -> float:
    """Return since when, in seconds since the epoch, a container's log is of this start; 0 if that is not known.

    A container that was stopped and is started again has the lines of its earlier runs.
    """
    state = engine.state(client, container)
    if state is None or state.restarts:  # Docker started it again already: why is in the lines before
        return 0.0
    with suppress(ValueError):
        # The engine writes the time down when the program runs, which may have printed by then.
        return max(0.0, datetime.fromisoformat(state.started).timestamp() - 1)
    return 0.0


def _wait(client: docker.DockerClient, server: Server, stack: str, tell: Callable[[str], None]) -> Server:
    """Wait until the container is healthy and has proved what clients call; return the record with that."""

    def is_healthy() -> bool:
        """Return what the container's own health check says; raise if it cannot get healthy any more."""
        state = engine.state(client, server.container)
        _require_alive(client, server, state)
        if state and state.health == "healthy":
            return True
        text = log_text(client, server)
        tell(logs.milestone(text) or ("validating" if "validate ·" in text else "starting"))
        return False

    deadline = time.monotonic() + READY_SECONDS
    if not openai.wait_until(is_healthy, deadline):
        raise _failure(client, server, "the container did not get healthy in time")
    try:
        return launch.proved(server, READY_SECONDS, server.key, stack)
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
    if state.health_output.startswith(TOO_OFTEN):
        failure, fix = "the container starts no server", "./inv doctor; then ./inv down, then ./inv up"
        raise ServerError(failure, state.health_output, fix, code="server.restarts")
    if state.health_output.startswith(container_health.REFUSED):  # SPARKFORGE_REFUSED=hold: it waits, we do not
        raise _refusal(log_text(client, server), server)
    if state.health == "unhealthy":
        raise _failure(client, server, f"the container is unhealthy: {state.health_output}")


def _end_of(client: docker.DockerClient, server: Server, state: State) -> SparkforgeError:
    """Return the error for a container whose program ended, perhaps to be started again by Docker."""
    text = log_text(client, server)
    if state.exit_code == REFUSED or REFUSAL in text:
        return _refusal(text, server)
    if state.out_of_memory:
        return _failure(client, server, "the kernel killed the container's server: its memory limit was reached")
    if state.restarts:
        return _failure(client, server, "the container's server ended by itself, and Docker started it again")
    return _failure(client, server, f"the container ended with code {state.exit_code}")


def _refusal(text: str, server: Server) -> RefusalError:
    """Return the error for a container whose validator refused, from its log."""
    failures, fix = logs.report_of(text)
    why = "\n        ".join(failures) or "its log does not say why"
    fix = f"{fix}; then ./inv up --device {server.device}" if fix else f"docker logs {server.container[:12]}"
    return RefusalError("the validator in the container refuses to serve", why, fix, code="validation.failed")


def _failure(client: docker.DockerClient, server: Server, failure: str) -> SparkforgeError:
    lines = logs.explain(log_text(client, server)) or ["its log is empty"]
    fix = f"./inv doctor   # the whole log: docker logs {server.container[:12]}"
    return ServerError(failure, "\n        ".join(lines), fix, code="server.start")


def health(server: Server) -> str:
    """Return the container's state according to its own health check, in words."""
    with engine.connected() as client:
        state = engine.state(client, server.container)
    if state is None:
        return "gone"
    output = f" ({state.health_output})" if state.health_output and state.health != "healthy" else ""
    return f"{state.health or state.status}{output}"


def last_log() -> str:
    """Return what our service's container, running or not, logged since its start; empty if there is none."""
    with engine.connected() as client:
        container = engine.service_container(client, docker_compose.project(), SERVICE)
        if container is None:
            return ""
        begin = _log_begin(client, container)
        return str(client.containers.get(container).logs(since=begin or None).decode(errors="replace"))


def log_text(client: docker.DockerClient, server: Server) -> str:
    """Return the last lines that a container logged since its start, stdout and stderr together."""
    container = client.containers.get(server.container)
    return str(container.logs(tail=LOG_LINES, since=server.started or None).decode(errors="replace"))
