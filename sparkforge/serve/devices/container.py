"""Serve in a container: engine, image, Compose, the container's own validation, first answers."""

import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import docker

from sparkforge.core import openai, paths
from sparkforge.core.console import Steps, say
from sparkforge.core.docker import require_plugin
from sparkforge.core.errors import EngineError, RefusalError, ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_atomic, write_json
from sparkforge.image import compose as docker_compose
from sparkforge.image import engine, trust, versions
from sparkforge.image.compose import SERVICE, Service
from sparkforge.image.devices import DOCKER, build_command, stack_of
from sparkforge.image.engine import State
from sparkforge.models import local
from sparkforge.serve import access, command_line, known_good, launch, logs, profiles, proof, record, settings
from sparkforge.serve import health as container_health
from sparkforge.serve.command_line import served_name
from sparkforge.serve.devices.device import UNPROVED, Device
from sparkforge.serve.record import LOOPBACK, Server, StartPlan
from sparkforge.serve.restarts import TOO_OFTEN

# 65 GB of weights from a disk, and 15 to 25 minutes of compiling if no kernel is cached (docs/reference/checks.md).
READY_SECONDS = 3600.0
CACHE = "/var/cache/sparkforge"  # the image's volume, with a folder of compiled code for each image (deploy/start)
LOG_LINES = 400  # of the container's log, that are read
# Compose's variables: the address to publish on, flags for vLLM, the model.
BIND, FLAGS, MODEL = access.BIND, settings.VLLM_ARGS, "SPARKFORGE_MODEL"
KERNEL_PAGE = "docs/guide/tune.md, your own kernel"
REFUSAL = "the validator refuses to serve"  # printed by sparkforge/serve/entrypoint.py
LEAK = (
    "WARNING: before version 28, Docker (here {version}) lets other machines of the same layer-2 network reach ports\n"
    "that are published on 127.0.0.1. Update Docker, or drop such packets in a firewall{key}."
)
ImageBuilder = Callable[[str, Steps], None]


class Container(Device):
    """The vllm service of our Compose files; `build(stack, steps)` makes a missing image."""

    compose_files: tuple[str, ...] = ()  # further files of the checkout, read after docker-compose.yml
    service: Service
    evidence: trust.Evidence | None = None  # the image's signers, if trust.toml requires signatures

    def __init__(self, plan: StartPlan, build: ImageBuilder) -> None:
        super().__init__(plan)
        self.build, self.env = build, variables(plan)

    def prepare(self) -> None:
        """Read the engine and the Compose files, refuse what the container would refuse, and build a missing image."""
        with self.steps.step("engine", "docker") as tell, engine.connected() as client:
            docker_engine = engine.read(client)
            require_plugin("compose")
            service = self.service = docker_compose.resolve(self.env)
            gpus = f", {docker_engine.gpu}" if service.gpus else ""
            try:
                if service.gpus:
                    docker_engine.require_gpu()
            except EngineError as error:
                fix = f"{error.fix}; without a GPU: ./inv up --device docker-cpu"
                raise EngineError(error.what, error.why, fix, code="engine.gpu") from error
            tell(f"Docker {docker_engine.version} on {docker_engine.platform}{gpus}")
        _require_passed_on(service, self.env)
        settings.read(service.environment)  # refuse now what the container would refuse, before an image is built
        access.require_key(service.host, service.key_file)
        if service.key_file:
            access.read_key(Path(service.key_file), private=False)  # before minutes are spent on an image
        if docker_engine.leaks_loopback_ports and service.host == LOOPBACK:
            key = "" if service.key_file else "; or start with --api-key-file FILE"
            say(LEAK.format(version=docker_engine.version, key=key))
        launch.check_free(service.port, service.host)
        if self.plan.image:
            override = paths.state() / "rollback.compose.json"
            write_json(override, {"services": {SERVICE: {"image": self.plan.image}}})
            self.compose_files = (*self.compose_files, str(override))
            service = replace(service, image=self.plan.image)
        with self.steps.step("image", service.image) as tell, engine.connected() as client:
            needed = (client, service.image, docker_engine.platform, build_command(service.stack))
            try:
                image = engine.require_image(*needed)
            except EngineError as error:
                if error.code != "engine.image" or self.plan.image:
                    raise
                trust.require_buildable(service.stack)  # before minutes are spent on an image that would be refused
                self.build(service.stack, self.steps)
                image = engine.require_image(*needed)
            # A rollback goes back to an older image; a start never does.
            self.evidence = trust.require(image, service.stack, back=bool(self.plan.image))
            signed = "no signature is required"
            if self.evidence:
                signed = f"signed by {', '.join(sorted(set(self.evidence.signed.values())))}"
            tell(f"{image.short_id}, {signed}")

    def validate(self) -> str:
        """Do nothing: the container validates itself before it serves, as only it has the packages and the GPU."""
        return "the container validates itself"

    def start(self) -> Server:
        """Start the container, after the tiny model's first answers if the plan wants them. An error stops it."""
        own, own_env = self.service, self.env
        if self.plan.tiny_first and own.gpus and own.environment.get(MODEL) != settings.TINY:
            self.env = {**own_env, MODEL: settings.TINY, f"{MODEL}_ID": ""}
            self.service = replace(own, environment=docker_compose.resolve(self.env).environment)
            if self.service.environment.get(MODEL) == settings.TINY:
                self.steps.total += 1
                self.try_tiny(self.serve, self.end)
            else:
                say(f"first answers left out: the Compose files do not read {MODEL}, so the tiny model is not served")
            self.service, self.env = own, own_env
        with self.steps.step("container") as tell:
            return self.serve(tell)

    def serve(self, tell: Callable[[str], None]) -> Server:
        """Start the service and return it once it has passed the start-up test."""
        service, inside = self.service, settings.read(self.service.environment)
        try:
            paths.secure_state()
            write_atomic(record.begun_path(), f"{docker_compose.project()}\n")
            log = paths.state() / "logs" / "compose.log"
            docker_compose.up(self.env, log, tell, more=self.compose_files)
            with engine.connected() as client:
                container = engine.service_container(client, docker_compose.project(), SERVICE)
                if container is None:
                    why, fix = "Compose started none", docker_compose.typed("ps", "--all")
                    raise ServerError("there is no container", why, fix, code="server.start")  # noqa: TRY301
                begun = _log_begin(client, container)
                served = (service.host, service.port, inside.model, inside.model_id, self.plan.device)
                server = Server(0, begun, *served, "", container, service.key_file, inside.serve_profile)
                record.write(server)
                record.begun_path().unlink()
                server = _wait(client, server, service.stack, settings.family(self.plan.model), tell)
        except BaseException as error:  # no server may be left; after a failure its log stays, with the container
            with suppress(SparkforgeError):  # the first error is the one to report
                self.end(docker_compose.down if isinstance(error, KeyboardInterrupt) else docker_compose.stop)
            raise
        tell(f"first answers received, {proof.describe(server.proof)}, in {server.proof_seconds:.1f} s")
        return server

    def end(self, how: Callable[[Mapping[str, str]], None] = docker_compose.stop) -> None:
        """Stop the container by `how` and forget it. Raises EngineError."""
        how(self.env)
        record.begun_path().unlink(missing_ok=True)
        record.forget()  # not before: where the engine does not answer, `./inv down` must still find it

    def remember(self, server: Server) -> None:
        """Record the start with the image's id and digests, and give the image a name that stays."""
        trust.accept(self.service.stack, self.evidence)
        if self.service.environment.get("SPARKFORGE_VALIDATE", settings.STRICT) != settings.STRICT:
            say(UNPROVED)
            return
        with engine.connected() as client:
            image = client.images.get(str(client.containers.get(server.container).attrs["Image"]))
            repository, _ = versions.split(self.service.image)
            name = versions.give_own_name(image, repository)
        digests = tuple(image.attrs.get("RepoDigests") or ())
        plan = replace(self.plan, stack=self.service.stack, image=str(image.id))
        known_good.remember(server, plan, name=name, digests=digests)


def variables(plan: StartPlan) -> dict[str, str]:
    """Return the variables that the Compose files read for a plan. Raises UsageError or InputError."""
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
        environment[command_line.PROFILER] = command_line.TRACES_IN_CONTAINER
    if plan.profile:
        profiles.named(plan.profile, stack=chosen)
        environment["SPARKFORGE_SERVE_PROFILE"] = plan.profile
    if plan.model:
        folder = paths.typed(plan.model).absolute()
        served_name(folder)
        if cache := local.hub_cache_of(folder):  # a snapshot's files are links to elsewhere in the cache
            mounted = local.MOUNTED / "hub" / folder.relative_to(cache)
            environment |= {"HF_HUB_CACHE": str(cache), MODEL: str(mounted)}
        else:
            environment |= {"SPARKFORGE_MODELS": str(folder.parent), MODEL: f"/models/{folder.name}"}
    numbers = {name: plan.variables.get(name) or os.environ.get(name, "") for name in settings.NUMBERS}
    settings.arguments(numbers)  # an invalid value is refused before a start
    settings.require_gpus(numbers["TP"])
    further = {**numbers, BIND: plan.host, FLAGS: shlex.join(plan.flags)}
    return {**environment, **{name: value for name, value in further.items() if value}}


def _require_passed_on(service: Service, env: Mapping[str, str]) -> None:
    """Raise UsageError if the Compose files, which may be a user's own, ignore a requested option."""
    host, profile, flags = env.get(BIND), env.get("SPARKFORGE_SERVE_PROFILE"), env.get(FLAGS)
    variable, inside = profiles.KERNEL_VARIABLE, service.environment
    served = inside.get("SPARKFORGE_SERVE_PROFILE", "")
    kernel = os.environ.get(variable)
    files = docker_compose.EXTRA_FILES
    fix = f"docker compose config   # compare your files ({files}) with docker-compose.yml of this checkout"
    if host and host != service.host:
        raise UsageError(f"--host {host} has no effect", f"the Compose files publish on {service.host}", fix)
    if profile and profile != served:
        raise UsageError(f"--profile {profile} has no effect", f"the Compose files serve {served or 'none'}", fix)
    if flags and flags not in [value.replace("$$", "$") for value in inside.values()]:
        raise UsageError(f"the flags {flags} have no effect", f"the Compose files do not pass {FLAGS} on", fix)
    if kernel and kernel != inside.get(variable):
        why = "the Compose files pass neither the shell's variable nor the kernel's files into the container"
        remark = f"or --device embedded, or write it into vllm.env and mount its folder ({KERNEL_PAGE})"
        raise UsageError(f"{variable}={kernel} has no effect", why, f"unset {variable}   # {remark}")


def _log_begin(client: docker.DockerClient, container: str) -> float:
    """Return when the log of a container's last start begins, in Unix time; 0 if unknown. Earlier runs are in it."""
    state = engine.state(client, container)
    if state and not state.restarts:  # if Docker started it again already, the earlier lines say why
        with suppress(ValueError):
            # The engine records the time once the program runs; it may have printed before that.
            return max(0.0, datetime.fromisoformat(state.started).timestamp() - 1)
    return 0.0


def _wait(client: docker.DockerClient, server: Server, stack: str, family: str, tell: Callable[[str], None]) -> Server:
    """Wait until the container is healthy and has answered the test calls; return the record with their results."""

    def is_healthy() -> bool:
        """Return the result of the container's health check; raise if it cannot become healthy any more."""
        state = engine.state(client, server.container)
        text = log_text(client, server) if state else ""
        if error := _failed(server, state, text):
            raise error
        tell(logs.milestone(text) or ("validating" if "validate ·" in text else "starting"))
        return state is not None and state.health == "healthy"

    failure = "the container did not get healthy in time"
    if openai.wait_until(is_healthy, time.monotonic() + READY_SECONDS):
        try:
            return launch.proved(server, READY_SECONDS, server.key, stack, family=family)
        except ServerError as error:
            failure = f"the container is healthy but cannot generate ({error.why})"
    raise logs.failure(failure, log_text(client, server), server.log_command)


def _failed(server: Server, state: State | None, text: str) -> SparkforgeError | None:
    """Return the error for a container that is gone, ended, was refused or is unhealthy; None if it may get healthy."""
    if state is None:
        fix = "./inv up --device docker"
        return ServerError("the container is gone", "somebody removed it", fix, code="server.start")
    ended = state.restarts or state.status in {"exited", "dead", "restarting"}
    # With SPARKFORGE_REFUSED=hold a refused container stays up, and its health check prints REFUSED.
    held = state.health_output.startswith(container_health.REFUSED)
    if (ended and (state.exit_code == RefusalError.exit_code or REFUSAL in text)) or (not ended and held):
        problem, again = "the validator in the container refuses to serve", f"./inv up --device {server.device}"
        return logs.refusal(problem, text, why="its log does not say why", fix=server.log_command, then=again)
    if not ended and state.health_output.startswith(TOO_OFTEN):
        fix = "./inv doctor   # when the cause is gone: ./inv down && ./inv up"
        return ServerError("the container starts no server", state.health_output, fix, code="server.restarts")
    if ended and state.out_of_memory:
        failure = "the kernel killed the container's server: its memory limit was reached"
    elif state.restarts:
        failure = "the container's server ended by itself, and Docker started it again"
    elif ended:
        failure = f"the container ended with code {state.exit_code}"
    elif state.health == "unhealthy":
        failure = f"the container is unhealthy: {state.health_output}"
    else:
        return None
    return logs.failure(failure, text, server.log_command)


def health(client: docker.DockerClient, server: Server) -> str:
    """Return the container's state according to its own health check, in words."""
    state = engine.state(client, server.container)
    if state is None:
        return "gone"
    output = f" ({state.health_output})" if state.health_output and state.health != "healthy" else ""
    return f"{state.health or state.status}{output}"


def last_log() -> str:
    """Return the log since the start of our service's container, running or not; empty without a container."""
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
