"""A bake-off of serve profiles: start, proof, gate and load of each in turn, and a ranking of those that pass.

The record `bakeoff.json` in the state folder gets each profile as it is finished, so an interrupted bake-off goes on
with the next one. `./inv up --profile auto` takes the first of the last finished one, where all that it depends on is
as it was then: model, device, stack, patches, kernels, flags of the profile, and machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from sparkforge import environments, pins
from sparkforge.bench import bakeoff, runs
from sparkforge.bench.bakeoff import Standing
from sparkforge.bench.machine import facts
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.documents import DocumentError, read_json
from sparkforge.core.errors import BenchmarkError, InputError, ServerError, SparkforgeError, UsageError
from sparkforge.core.files import sha256_file, write_json
from sparkforge.core.tables import Record
from sparkforge.environments import Environment
from sparkforge.image.devices import AUTO, EMBEDDED, stack_of
from sparkforge.serve import embedded, known_good, launch, profiles, record
from sparkforge.serve.record import Server
from sparkforge.serve.start import StartRequest

DEFAULT_MODEL = "the device's default"
# Of the options, what the results depend on. The server is the profile's, the folder is the record's.
SHAPE = (
    "tp",
    "isl",
    "osl",
    "conc",
    "random_range_ratio",
    "num_prompts",
    "warmups",
    "seed",
    "client",
    "text",
    "lm_eval",
)
CODE = ("*.py", "*.cu", "*.cuh", "*.json")  # of spark_mxfp4: plugin, kernels and their tuning
Starter = Callable[[StartRequest], Server]


class ProfileTrial(Record):
    """A profile's flags and variables when it was measured, and how it did."""

    settings: dict[str, str]
    standing: Standing


class BakeOff(Record):
    """The record. `identity` is what results are valid for, in words; `trials` are the finished profiles."""

    format: Literal["sparkforge-bakeoff/1"] = "sparkforge-bakeoff/1"
    identity: dict[str, str]
    shape: dict[str, str]
    profiles: list[str]
    trials: dict[str, ProfileTrial] = Field(default={})
    machine: dict[str, Any] = Field(default={})
    complete: bool = False

    @property
    def ranking(self) -> list[Standing]:
        """The standings, the fastest first, those that failed last."""
        return bakeoff.ranked([self.trials[name].standing for name in self.profiles if name in self.trials])


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


def identity(device: str, stack: str, model: str) -> dict[str, str]:
    """Return in words all but the profile that a result depends on. `model` is a folder, empty for the default."""
    machine, table = facts(), pins.load()
    folder = Path(model) if model else None
    weights = sorted(folder.glob("*.safetensors")) if folder else []
    checkpoint = {file.name: str(file.stat().st_size) for file in weights}
    if folder and (folder / "config.json").is_file():
        checkpoint["config.json"] = sha256_file(folder / "config.json")
    ours = sorted(file for kind in CODE for file in (paths.ROOT / "spark_mxfp4").rglob(kind))
    return {
        "model": model or DEFAULT_MODEL,
        "checkpoint": known_good.hashed(checkpoint),
        "device": device,
        "stack": stack,
        "locks and patches": known_good.hashed(_inputs(device, stack, table)),
        "code of spark_mxfp4": known_good.hashed(_files(ours)),
        "processor": f"{machine['processor']}, {machine['cores']} cores",
        "memory": f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        "GPUs and driver": "; ".join(machine["gpus"]) or "none",
    }


def _inputs(device: str, stack: str, table: pins.Pins) -> dict[str, str]:
    if device == EMBEDDED:
        return environments.inputs(Environment(stack), table)
    folders = {component.patches for component in table.stack(stack).components.values() if component.patches}
    patches = [file for folder in folders for file in (paths.ROOT / "patches" / folder).rglob("*") if file.is_file()]
    locks = paths.ROOT / "locks"
    return _files(sorted([*locks.glob(f"{stack}*"), locks / "patched.toml", *patches]))


def _files(files: Sequence[Path]) -> dict[str, str]:
    return {str(file.relative_to(paths.ROOT)): sha256_file(file) for file in files if file.is_file()}


def run(names: Sequence[str], flags: Mapping[str, Any], request: StartRequest, start: Starter, python: Path) -> None:
    """Try every profile on `request`'s device, print the ranking and write it.

    `flags` are the options of the load and the gate, `replace` and `fresh` among them. Raises UsageError for a profile
    that is not known, ServerError if a server runs and may not be replaced, BenchmarkError if none passed.
    """
    stack = stack_of(request.device, request.stack)
    settings = {name: _settings(name, request.device, stack) for name in _checked(names)}
    folder = paths.state() / "bench" / "bakeoff"
    with launch.alone():
        _make_way(request, replace_it=bool(flags.get("replace")))
    done = _resumed(
        BakeOff(
            identity=identity(request.device, stack, request.model),
            shape={name: str(flags[name]) for name in SHAPE if flags.get(name)},
            profiles=list(settings),
            machine=facts(),
        ),
        settings,
        fresh=bool(flags.get("fresh")),
    )
    for name, own in settings.items():
        if name not in done.trials:
            standing = _try(replace(request, profile=name, trial=True), flags, start, python, folder / name)
            trial = ProfileTrial(settings=own, standing=standing)
            done = done.model_copy(update={"trials": {**done.trials, name: trial}})
            _write(done)
    done = done.model_copy(update={"complete": True})
    _write(done)
    bakeoff.show(done.ranking, folder, "profile")
    say(f"record:  {record_path()}")
    if done.ranking[0].score is None:
        raise bakeoff.nobody_passed(done.ranking, "profile", f"less {folder}/*/server.log")
    say(f"the winner is {done.ranking[0].name}: ./inv up --profile {AUTO}")


def winner(device: str, stack: str, model: str) -> str:
    """Return the profile that won this machine's last bake-off, for the same model, device, stack, code and machine.

    Raises BenchmarkError, which names what has changed since.
    """
    last = read()
    fix = f"./inv bench.bakeoff --profiles A,B --device {device}"
    if last is None:
        raise _no_winner("no bake-off has run here", fix)
    again = f"./inv bench.bakeoff --profiles {','.join(last.profiles)} --device {device}"
    if not last.complete:
        missing = ", ".join(name for name in last.profiles if name not in last.trials)
        raise _no_winner(f"the last bake-off was interrupted before {missing or 'its end'}", again)
    for key, now in identity(device, stack, model).items():
        if (then := last.identity.get(key, "not known")) != now:
            raise _no_winner(f"{key}: then {_short(then)}, now {_short(now)}", again)
    best = last.ranking[0]
    if best.score is None:
        raise _no_winner("no profile passed the last bake-off", f"less {paths.state()}/bench/bakeoff/*/server.log")
    if last.trials[best.name].settings != _settings(best.name, device, stack):
        raise _no_winner(f"the profile {best.name} has other flags or variables now", again)
    say(f"profile: {best.name}, which won the bake-off of {last.machine.get('measured_at', 'an unknown day')}")
    return best.name


def _no_winner(why: str, fix: str) -> BenchmarkError:
    return BenchmarkError(f"--profile {AUTO} has no winner to take", why, fix, code="benchmark.stale")


def _short(text: str) -> str:
    return text[:12] if len(text) == 64 and " " not in text else text  # a hash


def _checked(names: Sequence[str]) -> list[str]:
    unique = list(dict.fromkeys(names))
    if not unique or AUTO in unique:
        why = f"{AUTO} is the winner of a bake-off" if unique else "--profiles takes names with commas"
        raise UsageError("these are no profiles to compare", why, "./inv bench.bakeoff --profiles safe,fast")
    return unique


def _settings(name: str, device: str, stack: str) -> dict[str, str]:
    """Return a profile's flags and variables. Raises UsageError for an unknown one, or one for another device."""
    profile = embedded.profile_named(name) if device == EMBEDDED else profiles.named(name, stack=stack)
    flags = {flag: str(setting.value) for flag, setting in profile.flags.items()}
    return {**flags, **profile.variables()}


def _make_way(request: StartRequest, *, replace_it: bool) -> None:
    """End the server that runs if it may be replaced, and one that a killed bake-off left. Raises ServerError."""
    server = record.read()
    if server is None or not server.alive:
        launch.check_free(request.port)
        return
    if not replace_it:
        failure, why = "a server of this checkout runs", f"{server.model_id} at {server.url}; a bake-off ends servers"
        raise ServerError(failure, why, "the same command with --replace, or ./inv down", code="server.running")
    say(f"{server.model_id} at {server.url} is ended (--replace); ./inv up starts it again")
    launch.stop()


def _resumed(wanted: BakeOff, settings: Mapping[str, Mapping[str, str]], *, fresh: bool) -> BakeOff:
    """Return `wanted` with the trials of an unfinished bake-off of the same profiles, shape and identity."""
    try:
        last = read()
    except InputError as error:
        say(f"{error.what} ({error.why}); this one begins anew")
        return wanted
    if last is None or last.complete or fresh or (last.identity, last.shape) != (wanted.identity, wanted.shape):
        return wanted
    kept = {name: trial for name, trial in last.trials.items() if settings.get(name) == trial.settings}
    if kept:
        say(f"going on with the interrupted bake-off; finished: {', '.join(kept)}")
    return wanted.model_copy(update={"trials": kept})


def _try(request: StartRequest, flags: Mapping[str, Any], start: Starter, python: Path, folder: Path) -> Standing:
    """Start a profile, gate it, load it, end it. A failure becomes its standing; an interrupt ends the server."""
    say(f"— {request.profile}")
    try:
        server = start(request)
        own: dict[str, Any] = {"url": server.url, "port": "", "model": "", "output": str(folder), "fresh": True}
        results = runs.measure({**flags, **own}, python).results
    except SparkforgeError as error:
        say(f"✗ {request.profile}: {error.what}")
        return Standing(name=request.profile, score=None, results=[], why=f"{error.what}: {error.why}")
    finally:
        _end(folder)
    return bakeoff.standing(request.profile, results)


def _end(folder: Path) -> None:
    """End the trial's server, if it runs, and keep its log."""
    log = record.log_path()
    with launch.alone():
        server = record.read()
        if (server and (server.alive or server.container)) or record.leftovers():
            launch.stop()
        elif server:  # it died under the load
            record.forget()
    if log.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "server.log").write_bytes(log.read_bytes())


def _write(done: BakeOff) -> None:
    write_json(record_path(), done.model_dump(mode="json"))
