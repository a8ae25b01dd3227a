"""Start and stop a server: one at a time per checkout, detached, with its log in a file, and nothing left behind."""

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sparkforge import pins
from sparkforge.core import interrupt, paths
from sparkforge.core.console import say
from sparkforge.core.docker import docker
from sparkforge.core.errors import ServerError, StorageError, UsageError
from sparkforge.core.files import holder, locked
from sparkforge.core.openai import Endpoint
from sparkforge.core.process import GRACE_SECONDS, listens, spawn, started_at, terminate, terminate_session
from sparkforge.image import compose as docker_compose
from sparkforge.image.devices import FLEET, stack_of
from sparkforge.patching import series
from sparkforge.serve import hold, logs, proof, record, settings
from sparkforge.serve.record import LOOPBACK, Server, StartPlan
from sparkforge.serve.supervise import supervised

# vLLM gives its processes titles, and setproctitle writes these over the environment in /proc, which has the mark of a
# server, unless this is set.
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
READY_SECONDS = 900.0  # a slow disk and two cores; a broken start ends by itself long before
LOCK, START = "serve.lock", hold.START
STOP = "stop the server"
CANCEL_SECONDS = 100.0  # for a start to end in order: Compose gives a container 60 s (stop_grace_period)


@dataclass(frozen=True)
class Launch:
    """A command with the environment added to ours, the plan that it serves, and its model's folder and family.

    `calls` are those of `proof.CALLS` that test a server other than vLLM.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    plan: StartPlan
    model: Path
    timeout: float = READY_SECONDS
    calls: tuple[str, ...] = ()
    family: str = ""


@contextmanager
def starting() -> Iterator[None]:
    """Do what `alone` and `make_ready` do. Raises their errors."""
    with alone():
        make_ready()
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Be the only command of this checkout that starts a server. Raises StorageError, which names the other one."""
    with locked(paths.state() / LOCK, START):
        yield


def make_ready() -> None:
    """End what a killed server left. To be called inside `alone`. Raises ServerError if our server runs."""
    refuse_second()
    _remove_models()
    if leftovers := record.leftovers():
        say(f"{record.describe_left(leftovers)}; they are ended first")
        terminate(leftovers)
    if record.begun_path().exists():
        say("a killed start left a container; it is removed first")
        _remove_container()


def refuse_second(command: str = "./inv up") -> None:
    """Raise ServerError, with `command` as what to run after `./inv down`, if our server runs."""
    server = record.read()
    if server and server.alive:
        failure, why = "a server of this checkout runs already", f"{server.model_id} at {server.url}"
        raise ServerError(failure, why, f"./inv down && {command}", code="server.running")


def check_free(port: int, host: str = LOOPBACK, command: str = "./inv up") -> None:
    """Raise ServerError if our server runs or another program has the port."""
    refuse_second(command)
    check_port(port, host, command)


def check_port(port: int, host: str, command: str = "./inv up") -> None:
    """Raise ServerError if a program has the port, UsageError for an invalid number; `command` takes --port."""
    if not 0 < port < 65536:
        raise UsageError(f"{port} is not a port", "ports are 1 to 65535", f"{command} --port 8000")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As uvicorn binds: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            failure, why = f"port {port} is taken", f"another program listens on {host}:{port}"
            fix = f"{command} --port {port + 1}"
            if isinstance(error, PermissionError):
                failure, why, fix = f"cannot use port {port}", str(error), f"{command} --port 8000"
            elif error.errno == errno.EADDRNOTAVAIL:
                why, fix = "this machine does not have that address", "hostname -I"
                failure = f"cannot listen on {host}"
            raise ServerError(failure, why, fix, code="server.port") from error


def start(launch: Launch, progress: Callable[[str], None]) -> Server:
    """Start a server; return its record after its first answers. Raises ServerError; then nothing is left running."""
    with ExitStack() as stack:
        check_free(launch.plan.port, launch.plan.address)
        with interrupt.held():  # no server may run unrecorded
            server = _spawn(launch)
            stack.push(lambda kind, *_: end(server) if kind else None)  # also Ctrl-C: nobody waits for it then

        def alive() -> bool:
            progress(logs.milestone(logs.read(Path(server.log))) or "starting")
            return server.alive

        try:
            deadline = time.monotonic() + launch.timeout
            endpoint = Endpoint(server.url, server.model_id, key=launch.plan.key)
            if endpoint.wait_until_serving(deadline, alive, lambda: listens(server.pid, launch.plan.port)):
                queues = "" if launch.calls else stack_of(server.device)
                seconds = max(1.0, deadline - time.monotonic())
                return proved(server, seconds, launch.plan.key, queues, launch.calls, launch.family)
            problem = "did not answer in time" if server.alive else f"{record.how_it_ended(server)}, before it served"
        except ServerError as error:
            problem = f"is healthy but cannot generate ({error.why})"
        raise logs.failure(f"the server {problem}", logs.read(Path(server.log)), server.log_command)


def begin(launch: Launch) -> Server:
    """Start a server that is tested elsewhere (cluster's worker, fleet); return its record. Call inside `starting`."""
    refuse_second()
    with interrupt.held():
        return _spawn(launch)


def proved(
    server: Server, seconds: float, key: str, stack: str, calls: tuple[str, ...] = (), family: str = ""
) -> Server:
    """Run the start-up test with the stack's patches; record and return the tested server. Raises ServerError."""
    queues = [] if calls else series.queues(pins.load(), stack)
    patches = [patch.name for _, queue in queues for patch in queue.patches]
    began = time.monotonic()
    outcome = proof.prove(Endpoint(server.url, server.model_id, key=key), seconds, patches, calls, family)
    server = replace(server, proved=time.time(), proof=outcome, proof_seconds=time.monotonic() - began)
    record.write(server)
    return server


def down() -> Server | None:
    """End a start or a rollback that is under way, or waits after a refusal, then `stop`. Raises also StorageError."""
    lock = paths.state() / LOCK
    if not lock.exists():  # nothing was ever started here
        return stop()
    deadline = time.monotonic() + CANCEL_SECONDS
    asked: set[int] = set()
    while True:
        holders = [holder(path, START) for path in (lock, lock.with_name(hold.LOCK))]
        for pid in [pid for pid in holders if pid is not None and pid not in asked]:
            say(f"pid {pid} is starting a server; it is asked to end, which may take a minute")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)  # as Ctrl-C: it ends what it has started
            asked.add(pid)
        try:
            with locked(lock.with_name(hold.LOCK), STOP), locked(lock, STOP):
                return stop()
        except StorageError as error:
            if error.code != "storage.busy" or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def stop() -> Server | None:
    """End the running server with its children, and what killed servers left; return the server's record, if any.

    Raises ServerError if there was nothing to end.
    """
    recorded = record.read()
    removed = not (recorded and recorded.alive) and _remove_models()
    leftovers = record.leftovers()
    if leftovers:
        say(f"{record.describe_left(leftovers)}; they are ended")
        terminate(leftovers)
    if (recorded and recorded.container) or record.begun_path().exists():  # also one that has ended
        _remove_container()
        record.forget()
    elif removed or (leftovers and not (recorded and recorded.alive)):
        record.forget()
    else:
        recorded = record.running()
        end(recorded)
    return recorded


def _remove_models() -> bool:
    """Remove the containers of models that a killed fleet has left; return whether there were any."""
    removed = False
    for path in paths.state().glob(f"{record.MODELS}/*/{record.NAME}"):
        if (model := record.read(path)) and model.container and model.alive:
            say(f"a killed fleet left {path.parent.name} in {model.where}; it is removed")
            docker(["rm", "--force", model.container])
            path.unlink()
            removed = True
    return removed


def _remove_container() -> None:
    docker_compose.down({})
    record.begun_path().unlink(missing_ok=True)


def end(server: Server) -> None:
    """End a server with all its children and forget it."""
    terminate_session(server.pid, grace=CANCEL_SECONDS if server.device == FLEET else GRACE_SECONDS)
    record.forget()


def _spawn(launch: Launch) -> Server:
    plan, log, end_file = launch.plan, record.log_path(), record.end_path()
    if log.exists():
        log.replace(log.with_name("server.previous.log"))
    end_file.unlink(missing_ok=True)
    environment = {**os.environ, **launch.environment, record.MARK: record.mark(), **KEEP_ENVIRONMENT}
    environment.pop(settings.VLLM_ARGS, None)  # its flags are in the command; vLLM would warn of the variable
    weights = str(launch.model) if plan.model_id and plan.device != FLEET else ""
    command = supervised(launch.command, end_file, weights, trial=plan.trial)
    pid = spawn(command, log=log, env=environment, cwd=paths.state())
    served = (plan.address, plan.port, str(launch.model), plan.model_id, plan.device)
    server = Server(pid, started_at(pid) or 0.0, *served, str(log), key_file=plan.key_file or "", profile=plan.profile)
    try:
        record.write(server)
    except BaseException:  # such as a full disk: an unrecorded server could not be found
        terminate_session(pid)
        raise
    return server
