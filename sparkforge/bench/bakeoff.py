"""A bake-off of serve profiles: start, proof, gate and load of each in turn, and a ranking of those that pass.

The record `bakeoff.json` in the state folder gets each profile as it is finished, so an interrupted bake-off goes on
with the next one. `./inv up --profile auto` takes the first of the last finished one, where all that it depends on is
as it was then: model, device, stack, patches, kernels, flags of the profile, settings of the server, and machine.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from rich.table import Table

from sparkforge import environments, pins
from sparkforge.bench import runs
from sparkforge.bench.context import facts
from sparkforge.bench.report import PER_GPU, format_figure
from sparkforge.bench.schema import Result
from sparkforge.bench.settings import MOST, NAMES, BenchSettings
from sparkforge.core import paths
from sparkforge.core.console import console, say
from sparkforge.core.documents import DocumentError, read_json
from sparkforge.core.errors import (
    BenchmarkError,
    InputError,
    ProcessError,
    RefusalError,
    ServerError,
    SparkforgeError,
    UsageError,
)
from sparkforge.core.files import locked, sha256_file, write_atomic, write_json
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import CONTEXT, flag_value
from sparkforge.environments import Environment
from sparkforge.image import compose as docker_compose
from sparkforge.image.devices import AUTO, EMBEDDED, stack_of
from sparkforge.serve import known_good, launch, logs, profiles, record
from sparkforge.serve import settings as server_settings
from sparkforge.serve.command_line import served_name
from sparkforge.serve.devices import container, embedded
from sparkforge.serve.plan import LOOPBACK, StartPlan
from sparkforge.serve.profiles import ServeProfile
from sparkforge.serve.record import Server
from sparkforge.serve.settings import CONTEXT_VARIABLE

# What results depend on, beside --lm-eval. The server is the profile's.
CONFIGURATION = ("tp", "isl", "osl", "conc", "random_range_ratio", "num_prompts", "warmups", "seed")
# Options that the same command needs again; the folder is the record's. The context is the server's, as asked for.
REPEATED = (*CONFIGURATION, "lm_eval", "text", "silence", "limit")
# A trial that ends with one of these says something of its profile, but for the codes: those are the machine's state.
PROFILE_ERRORS = (ServerError, RefusalError, BenchmarkError, ProcessError)
MACHINE_CODES = {"server.running", "server.port", "process.setup"}
VARIABLE_PREFIXES = ("VLLM_", "SPARK_MXFP4_", "FLASHINFER_")  # of those that change how a server computes
LOG = "server.log"  # of a profile, in its folder
CODE_FILES = ("*.py", "*.cu", "*.cuh", "*.json")  # of spark_mxfp4: plugin, kernels and their tuning
Starter = Callable[[StartPlan], Server]


class Standing(Record):
    """How one profile did."""

    name: str
    score: float | None = Field(description="geometric mean of tput_per_gpu over all configurations; None if it failed")
    results: list[Result]
    why: str = ""


class ProfileTrial(Record):
    """A profile's flags and variables when it was measured, and how it did."""

    settings: dict[str, str]
    standing: Standing


class BakeOff(Record):
    """The record. `identity` is what results are valid for, in words; `trials` are the finished profiles.

    `shape` has the values in effect of what a resumed bake-off must share; `options` and `environment` are how they
    were given.
    """

    format: Literal["sparkforge-bakeoff/1"] = "sparkforge-bakeoff/1"
    identity: dict[str, str]
    shape: dict[str, str]
    profiles: list[str] = Field(min_length=1)
    trials: dict[str, ProfileTrial] = Field(default={})
    options: dict[str, str] = Field(default={})
    environment: dict[str, str] = Field(default={})
    machine: dict[str, Any] = Field(default={})
    complete: bool = False

    @model_validator(mode="after")
    def _check(self) -> BakeOff:
        if wrong := [name for name, trial in self.trials.items() if trial.standing.name != name]:
            raise ValueError(f"the trial of {wrong[0]} has another profile's standing")
        if self.complete and (missing := [name for name in self.profiles if name not in self.trials]):
            raise ValueError(f"it is complete and lacks {missing[0]}")
        return self

    @property
    def ranking(self) -> list[Standing]:
        """The standings, the fastest first, those that failed last."""
        standings = [self.trials[name].standing for name in self.profiles if name in self.trials]
        return sorted(standings, key=lambda standing: -(standing.score or 0.0))


def record_path() -> Path:
    """Return where the record lies."""
    return paths.state() / "bakeoff.json"


def read() -> BakeOff | None:
    """Return the record of the last bake-off; None if there is none. Raises InputError for one that is malformed."""
    try:
        return BakeOff.model_validate(read_json(record_path()))
    except FileNotFoundError:
        return None
    except (DocumentError, ValidationError) as error:
        why = str(error).splitlines()[0]
        fix = f"rm {record_path()}, then ./inv bench.bakeoff --profiles A,B"
        raise InputError("the record of the last bake-off cannot be read", why, fix, code="input.result") from error


@dataclass(frozen=True)
class TrialServer:
    """What a plan serves, whatever its profile. `arguments` come behind the profile's; `facts` are in words."""

    stack: str
    model_id: str
    arguments: tuple[str, ...]
    facts: Mapping[str, str]


def resolve(plan: StartPlan) -> TrialServer:
    """Return what a plan serves: in a container what Compose makes of it, `.env` and the user's own files.

    Who may ask, the profiler and the flags behind `--` do not count. Raises UsageError, InputError, EngineError.
    """
    plan = replace(plan, profile="", host="", key_file=None, hosts=(), profiled=False, flags=())
    if plan.device == EMBEDDED:
        stack, variables = stack_of(plan.device, plan.stack), plan.variables
        model_id = served_name(paths.typed(plan.model).absolute()) if plan.model else server_settings.TINY_ID
        arguments, own = embedded.vllm_arguments(plan.variables), dict[str, str]()
    else:
        service = docker_compose.resolve(container.variables(plan))
        inside = server_settings.read(service.environment)
        stack, variables = service.stack, service.environment
        model_id, arguments = inside.model_id, inside.arguments
        own = {"image": service.image, "the container's model": inside.model}
    counted = {name: value for name, value in variables.items() if name.startswith(VARIABLE_PREFIXES)}
    settings = {
        "the server's settings": shlex.join(arguments) or "the profile's",
        "the server's variables": known_good.hashed(counted),
    }
    return TrialServer(stack, model_id, arguments, {**own, **settings})


def identity(plan: StartPlan, served: TrialServer) -> dict[str, str]:
    """Return in words all but the profile that a result depends on."""
    machine, table = facts(), pins.load()
    folder = Path(plan.model) if plan.model else None
    weights = sorted(folder.glob("*.safetensors")) if folder else []
    checkpoint = {file.name: str(file.stat().st_size) for file in weights}
    if folder and (folder / "config.json").is_file():
        checkpoint["config.json"] = sha256_file(folder / "config.json")
    ours = sorted(file for kind in CODE_FILES for file in (paths.ROOT / "spark_mxfp4" / "src").rglob(kind))
    return {
        "model": plan.model or "the device's default",
        "checkpoint": known_good.hashed(checkpoint),
        "device": plan.device,
        "stack": served.stack,
        **served.facts,
        "locks and patches": known_good.hashed(_inputs(plan.device, served.stack, table)),
        "code of spark_mxfp4": known_good.hashed(_hashes(ours)),
        "processor": f"{machine['processor']}, {machine['cores']} cores",
        "memory": f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        "GPUs and driver": "; ".join(machine["gpus"]) or "none",
    }


def _inputs(device: str, stack: str, table: pins.Pins) -> dict[str, str]:
    if device == EMBEDDED:
        return environments.inputs(Environment(stack), table)
    folders = {component.patches for component in table.stack(stack).components.values() if component.patches}
    patches = [file for folder in folders for file in (paths.ROOT / "patches" / folder).rglob("*")]
    locks = paths.ROOT / "locks"
    return _hashes(sorted([*locks.glob(f"{stack}*"), locks / "patched.toml", *patches]))


def _hashes(files: Sequence[Path]) -> dict[str, str]:
    return {str(file.relative_to(paths.ROOT)): sha256_file(file) for file in files if file.is_file()}


def run(names: Sequence[str], flags: Mapping[str, Any], plan: StartPlan, start: Starter) -> None:
    """Try every profile on `plan`'s device, print the ranking and write it.

    `flags` are the options of the load and the gate, `replace` and `fresh` among them. Raises UsageError for a profile
    that is not known, ServerError if a server runs and may not be replaced or another command ended a trial's,
    BenchmarkError if none passed, and every error that the command or the machine causes.
    """
    names = list(dict.fromkeys(names))
    if not names or AUTO in names:
        why = f"{AUTO} is the winner of a bake-off" if names else "--profiles takes names with commas"
        raise UsageError("these are no profiles to compare", why, "./inv bench.bakeoff --profiles safe,fast")
    with locked(paths.state() / "bakeoff.lock", "run a bake-off beside another"):
        folder, served = paths.state() / "bench" / "bakeoff", resolve(plan)
        chosen = {name: _profile(name, plan.device, served.stack) for name in names}
        # Before a running server is ended, every option is checked.
        shapes = [_shape(flags, (*profile.arguments(), *served.arguments), served) for profile in chosen.values()]
        settings = {name: _settings(profile) for name, profile in chosen.items()}
        with launch.alone():
            _end_running_server(plan, may_end=bool(flags.get("replace")))
        variables = {variable: name for name, (variable, _) in NAMES.items() if name in REPEATED and name != "tp"}
        wanted = BakeOff(
            identity=identity(plan, served),
            shape=shapes[0],
            profiles=names,
            options={name: str(flags[name]) for name in REPEATED if flags.get(name)},
            environment={
                variable: os.environ[variable]
                for variable, name in variables.items()
                if os.environ.get(variable) and not flags.get(name)
            },
            machine=facts(),
        )
        bakeoff = wanted if flags.get("fresh") else _resumed(wanted, settings)
        for name, own in settings.items():
            if name not in bakeoff.trials:
                standing = _run_trial(replace(plan, profile=name, trial=True), flags, start, folder / name)
                trial = ProfileTrial(settings=own, standing=standing)
                bakeoff = bakeoff.model_copy(update={"trials": {**bakeoff.trials, name: trial}})
                write_json(record_path(), bakeoff.model_dump(mode="json"))
        bakeoff = bakeoff.model_copy(update={"complete": True})
        write_json(record_path(), bakeoff.model_dump(mode="json"))
    table = Table("rank", "profile", PER_GPU, "bits/byte", "", title="bakeoff: geometric mean over all loads")
    for rank, standing in enumerate(bakeoff.ranking, 1):
        bits = standing.results[0].gate.bits_per_byte if standing.results else None
        figures = (format_figure(standing.score), format_figure(bits))
        table.add_row("-" if standing.score is None else str(rank), standing.name, *figures, standing.why[:200])
    console().print(table)
    say(f"record: {record_path()}")
    if bakeoff.ranking[0].score is None:
        why = "\n        ".join(f"{standing.name}: {standing.why}" for standing in bakeoff.ranking)
        raise BenchmarkError("no profile passed", why, _show_reasons(bakeoff), code="benchmark.bakeoff")
    context = {"context": plan.variables.get(CONTEXT_VARIABLE, "")}
    say(f"the winner is {bakeoff.ranking[0].name}: {_command(['up', '--profile', AUTO], plan, context)}")


def winner(plan: StartPlan) -> str:
    """Return the profile that won this machine's last bake-off, for the same model, device, stack, code and machine.

    Raises BenchmarkError, which names what has changed since, and what `resolve` raises.
    """

    def refusal(why: str, fix: str) -> BenchmarkError:
        return BenchmarkError(f"--profile {AUTO} has no winner to take", why, fix, code="benchmark.stale")

    last = read()
    if last is None:
        raise refusal("no bake-off has run here", _command(["bench.bakeoff", "--profiles", "A,B"], plan))
    options = {**last.options, "max_model_len": plan.variables.get(CONTEXT_VARIABLE, "")}
    again = _command(["bench.bakeoff", "--profiles", ",".join(last.profiles)], plan, options, last.environment)
    if not last.complete:
        missing = ", ".join(name for name in last.profiles if name not in last.trials)
        raise refusal(f"the last bake-off was interrupted before {missing or 'its end'}", again)
    served = resolve(plan)
    for key, now in identity(plan, served).items():
        if (then := last.identity.get(key, "not known")) != now:
            raise refusal(f"{key}: then {_abbreviated(then)}, now {_abbreviated(now)}", again)
    best = last.ranking[0]
    if best.score is None:
        raise refusal("no profile passed the last bake-off", _show_reasons(last))
    if last.trials[best.name].settings != _settings(_profile(best.name, plan.device, served.stack)):
        raise refusal(f"the profile {best.name} has other flags or variables now", again)
    say(f"profile: {best.name}, which won the bake-off of {last.machine.get('measured_at', 'an unknown day')}")
    return best.name


def _command(
    words: Sequence[str],
    plan: StartPlan,
    options: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return a command for the server of `plan`, with more options by name, as a user types it."""
    chosen = {"device": plan.device, "model": plan.model, "stack": plan.stack, **(options or {})}
    arguments = [word for name, value in chosen.items() if value for word in (f"--{name.replace('_', '-')}", value)]
    variables = {**(environment or {}), "TP": plan.variables.get("TP", "")}
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value]
    return " ".join([*assignments, shlex.join(["./inv", *words, *arguments])])


def _show_reasons(bakeoff: BakeOff) -> str:
    """Return the command that shows why profiles failed: their logs, or the record, which has each reason."""
    kept = [paths.state() / "bench" / "bakeoff" / name / LOG for name in bakeoff.profiles]
    return shlex.join(["less", *map(str, [log for log in kept if log.is_file()] or [record_path()])])


def _abbreviated(text: str) -> str:
    return text[:12] if len(text) == 64 and " " not in text else text  # a hash


def _profile(name: str, device: str, stack: str) -> ServeProfile:
    """Return a profile. Raises UsageError for an unknown one, or one for another device."""
    return embedded.profile_named(name) if device == EMBEDDED else profiles.named(name, stack=stack)


def _settings(profile: ServeProfile) -> dict[str, str]:
    """Return a profile's flags and variables."""
    flags = {flag: str(setting.value) for flag, setting in profile.flags.items()}
    return {**flags, **profile.variables()}


def _shape(flags: Mapping[str, Any], arguments: Sequence[str], served: TrialServer) -> dict[str, str]:
    """Return the values in effect of what results depend on. Raises what `runs.check` raises.

    `arguments` are those of the server, which say how long its sequences may be.
    """
    declared = flag_value(arguments, CONTEXT) or ""
    longest = int(declared) if declared.isdecimal() else MOST
    configs, passage = runs.check(flags, served.model_id, longest)
    values = {name: ",".join(str(getattr(config, name)) for config in configs) for name in CONFIGURATION}
    values["lm_eval"] = str(flags.get("lm_eval") or "")
    context = BenchSettings(flags).text("max_model_len")
    return {**values, "max_model_len": context, "text": passage.name + passage.sha256}


def _end_running_server(plan: StartPlan, *, may_end: bool) -> None:
    """End the server that runs if it may be ended, and one that a killed bake-off left.

    Raises ServerError, and UsageError for a port that cannot be used.
    """
    server = record.read()
    if server is None or not server.alive:
        launch.check_free(plan.port)
        return
    if not may_end:
        failure, why = "a server of this checkout runs", f"{server.model_id} at {server.url}; a bake-off ends servers"
        raise ServerError(failure, why, "the same command with --replace, or ./inv down", code="server.running")
    if plan.port != server.port:
        launch.check_port(plan.port, LOOPBACK)
    say(f"{server.model_id} at {server.url} is ended (--replace); ./inv up starts it again")
    launch.stop()


def _resumed(wanted: BakeOff, settings: Mapping[str, Mapping[str, str]]) -> BakeOff:
    """Return `wanted` with the trials of an unfinished bake-off of the same profiles, shape and identity."""
    try:
        last = read()
    except InputError as error:
        say(f"{error.what} ({error.why}); this one begins anew")
        return wanted
    if last is None or last.complete or (last.identity, last.shape) != (wanted.identity, wanted.shape):
        return wanted
    kept = {name: trial for name, trial in last.trials.items() if settings.get(name) == trial.settings}
    if kept:
        say(f"going on with the interrupted bake-off; finished: {', '.join(kept)}")
    return wanted.model_copy(update={"trials": kept})


def _run_trial(plan: StartPlan, flags: Mapping[str, Any], start: Starter, folder: Path) -> Standing:
    """Start a profile, gate it, load it, end it. A failure that is the profile's own becomes its standing.

    Every other one is raised, and a ServerError if another command ended the server: the figures may be another's.
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
                except SparkforgeError as second:  # the first error is the one to report
                    say(f"{second.what}: {second.why}; ./inv down ends the trial's server")
            raise
        say(f"✗ {plan.profile}: {error.what}")
        standing = Standing(name=plan.profile, score=None, results=[], why=f"{error.what}: {error.why}")
    else:
        reasons = [reason for result in results for reason in result.reasons]
        score = None if reasons else mean_throughput(results)
        standing = Standing(name=plan.profile, score=score, results=results, why="; ".join(reasons))
    if server is None:
        _keep_log(folder, in_container=plan.device != EMBEDDED)
    elif not _end(server, folder):
        why = f"{plan.profile} gets no standing: what was measured may be of another server"
        fix = f"run the same command again, it goes on with {plan.profile}"
        raise ServerError("the trial's server was ended by another command", why, fix, code="server.not-running")
    return standing


def mean_throughput(results: Sequence[Result]) -> float | None:
    """Return the geometric mean of tput_per_gpu; None without a figure."""
    figures = [result.metrics.tput_per_gpu for result in results if result.metrics]
    return math.exp(sum(map(math.log, figures)) / len(figures)) if figures and min(figures) > 0 else None


def _end(server: Server, folder: Path) -> bool:
    """End the trial's server and keep its log; return False, and touch nothing, if another command has ended it."""
    with launch.alone():
        if record.read() != server:
            return False
        _keep_log(folder, in_container=bool(server.container))
        try:
            launch.stop()
        except ServerError as error:
            if error.code != "server.not-running":
                raise
            record.forget()  # it died under the load
    return True


def _keep_log(folder: Path, *, in_container: bool) -> None:
    with suppress(SparkforgeError, OSError):  # a log is no reason to leave a server running
        if text := container.last_log() if in_container else logs.read(record.log_path()):
            write_atomic(folder / LOG, text)
