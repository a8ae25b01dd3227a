"""A bake-off: starts each serve profile in turn, runs accuracy gate and load, and ranks the profiles that pass.

Each finished profile is added to the record `bakeoff.json` in the state folder.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from sparkforge.bench import runs
from sparkforge.bench.context import facts
from sparkforge.bench.report import PER_GPU, format_figure
from sparkforge.bench.schema import Result
from sparkforge.bench.settings import MAX_VALUE
from sparkforge.core import paths
from sparkforge.core.console import console, say
from sparkforge.core.errors import BenchmarkError, ProcessError, RefusalError, ServerError, SparkforgeError, UsageError
from sparkforge.core.files import locked, write_atomic, write_json
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import CONTEXT, flag_value
from sparkforge.image import compose as docker_compose
from sparkforge.image.devices import CONTAINERS, EMBEDDED, stack_of
from sparkforge.serve import launch, logs, profiles, record
from sparkforge.serve import settings as server_settings
from sparkforge.serve.command_line import served_name
from sparkforge.serve.devices import container, in_environment
from sparkforge.serve.record import LOOPBACK, Server, StartPlan
from sparkforge.serve.settings import CONTEXT_VARIABLE

# A trial's errors that count against its profile, except errors with MACHINE_CODES, which the machine's state causes.
PROFILE_ERRORS = (ServerError, RefusalError, BenchmarkError, ProcessError)
MACHINE_CODES = {"server.running", "server.port", "process.setup"}
LOG = "server.log"  # a profile's log, in its folder
Starter = Callable[[StartPlan], Server]


class Standing(Record):
    """The result of one profile."""

    name: str
    score: float | None = Field(description="geometric mean of tput_per_gpu over all configurations; None if it failed")
    results: list[Result]
    why: str = ""


class BakeOff(Record):
    """The record of the last bake-off; `settings` has each profile's flags and variables."""

    format: Literal["sparkforge-bakeoff/2"] = "sparkforge-bakeoff/2"
    machine: dict[str, Any]
    settings: dict[str, dict[str, str]]
    standings: list[Standing] = Field(description="the fastest first, those that failed last")


def record_path() -> Path:
    """Return the path of the record."""
    return paths.state() / "bakeoff.json"


def run(names: Sequence[str], flags: Mapping[str, Any], plan: StartPlan, start: Starter) -> None:
    """Try every profile on `plan`'s device, print the ranking and write it.

    `flags` are the options of the load and the gate, including `replace`. Raises UsageError for an unknown profile,
    ServerError if a server runs that may not be replaced or another command ended a trial's server, BenchmarkError if
    no profile passed, and every error that the command or the machine causes.
    """
    names = list(dict.fromkeys(names))
    if not names:
        why = "--profiles takes comma-separated names"
        raise UsageError("there is no profile to measure", why, "./inv bench.bakeoff --profiles safe,fast")
    with locked(paths.state() / "bakeoff.lock", "run a bake-off beside another"):
        folder, (stack, model_id, arguments) = paths.state() / "bench" / "bakeoff", _served(plan)
        chosen = {
            name: in_environment.profile_named(name) if plan.device == EMBEDDED else profiles.named(name, stack=stack)
            for name in names
        }
        for profile in chosen.values():  # every option is checked before a running server is ended
            declared = flag_value((*profile.arguments(), *arguments), CONTEXT) or ""
            runs.check(flags, model_id, int(declared) if declared.isdecimal() else MAX_VALUE)
        with launch.alone():
            _end_running_server(plan, may_end=bool(flags.get("replace")))
        standings = list[Standing]()
        settings = {
            name: {flag: str(setting.value) for flag, setting in profile.flags.items()} | profile.variables()
            for name, profile in chosen.items()
        }
        for name in names:
            standings.append(_run_trial(replace(plan, profile=name, trial=True), flags, start, folder / name))
            standings.sort(key=lambda standing: -(standing.score or 0.0))
            bakeoff = BakeOff(machine=facts(), settings=settings, standings=standings)
            write_json(record_path(), bakeoff.model_dump(mode="json"))
    table = Table("rank", "profile", PER_GPU, "bits/byte", "", title="bakeoff: geometric mean over all loads")
    for rank, standing in enumerate(standings, 1):
        bits = standing.results[0].gate.bits_per_byte if standing.results else None
        figures = (format_figure(standing.score), format_figure(bits))
        table.add_row("-" if standing.score is None else str(rank), standing.name, *figures, standing.why[:200])
    console().print(table)
    say(f"record: {record_path()}")
    if standings[0].score is None:
        why = "\n        ".join(f"{standing.name}: {standing.why}" for standing in standings)
        kept = [log for name in names if (log := folder / name / LOG).is_file()] or [record_path()]
        raise BenchmarkError("no profile passed", why, shlex.join(["less", *map(str, kept)]), code="benchmark.bakeoff")
    options = {"profile": standings[0].name, "device": plan.device, "model": plan.model, "stack": plan.stack}
    options["context"] = plan.variables.get(CONTEXT_VARIABLE, "")
    words = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    tp = f"TP={shlex.quote(parts)} " if (parts := plan.variables.get("TP", "")) else ""
    say(f"the winner is {standings[0].name}: {tp}{shlex.join(['./inv', 'up', *words])}")


def _served(plan: StartPlan) -> tuple[str, str, tuple[str, ...]]:
    """Return the stack that a plan serves, the model's id, and the server's arguments after the profile's."""
    if plan.device not in CONTAINERS:
        model_id = served_name(paths.typed(plan.model).absolute()) if plan.model else server_settings.TINY_ID
        device = in_environment.Embedded if plan.device == EMBEDDED else in_environment.Gpu
        return stack_of(plan.device, plan.stack), model_id, device.from_variables(plan.variables)
    service = docker_compose.resolve(container.variables(plan))
    inside = server_settings.read(service.environment)
    return service.stack, inside.model_id, inside.arguments


def _end_running_server(plan: StartPlan, *, may_end: bool) -> None:
    """End the running server if that is allowed. Raises ServerError, and UsageError for an unusable port."""
    server = record.read()
    if server is None or not server.alive:
        launch.check_free(plan.port)
        return
    if not may_end:
        failure, why = "a server of this checkout runs", f"{server.model_id} at {server.url}; a bake-off would end it"
        raise ServerError(failure, why, "--replace", code="server.running")
    if plan.port != server.port:
        launch.check_port(plan.port, LOOPBACK)
    say(f"{server.model_id} at {server.url} is ended (--replace); ./inv up starts it again")
    launch.stop()


def _run_trial(plan: StartPlan, flags: Mapping[str, Any], start: Starter, folder: Path) -> Standing:
    """Start a profile's server, run gate and load, and end the server. A failure of the profile becomes its standing.

    Other failures are raised. If another command ended the server, ServerError is raised, because the figures may be
    those of another server.
    """
    say(f"— {plan.profile}")
    (folder / LOG).unlink(missing_ok=True)
    server: Server | None = None
    try:
        server = start(plan)
        own: dict[str, Any] = {"url": server.url, "port": "", "model": "", "output": str(folder), "fresh": True}
        results = runs.measure({**flags, **own}).results
    except BaseException as error:
        if not isinstance(error, PROFILE_ERRORS) or error.code in MACHINE_CODES:
            if server:
                try:
                    _end(server, folder)
                except SparkforgeError as second:  # the first error is reported
                    say(f"{second.what}: {second.why}; ./inv down ends the trial's server")
            raise
        say(f"✗ {plan.profile}: {error.what}")
        standing = Standing(name=plan.profile, score=None, results=[], why=f"{error.what}: {error.why}")
    else:
        reasons = [reason for result in results for reason in result.reasons]
        figures = [result.metrics.tput_per_gpu for result in results if result.metrics]
        is_ranked = not reasons and figures and min(figures) > 0
        score = math.exp(sum(map(math.log, figures)) / len(figures)) if is_ranked else None  # the geometric mean
        standing = Standing(name=plan.profile, score=score, results=results, why="; ".join(reasons))
    if server is None:
        _keep_log(folder, in_container=plan.device in CONTAINERS)
    elif not _end(server, folder):
        why = f"{plan.profile} is not ranked: the figures may be of another server"
        raise ServerError("the trial's server was ended by another command", why, "again", code="server.not-running")
    return standing


def _end(server: Server, folder: Path) -> bool:
    with launch.alone():
        if record.read() != server:
            return False
        _keep_log(folder, in_container=bool(server.container))
        try:
            launch.stop()
        except ServerError as error:
            if error.code != "server.not-running":
                raise
            record.forget()  # the server ended during the load
    return True


def _keep_log(folder: Path, *, in_container: bool) -> None:
    with suppress(SparkforgeError, OSError):  # a failure here must not leave a server running
        if text := container.last_log() if in_container else logs.read(record.log_path()):
            write_atomic(folder / LOG, text)
