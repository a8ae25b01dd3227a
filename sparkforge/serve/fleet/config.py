"""fleet.toml, and the fleet's plan: resident models, and models that start at a request."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

import psutil
from pydantic import AfterValidator, Field, StringConstraints, model_validator

from sparkforge.core import memory, tables
from sparkforge.core.errors import InputError, RefusalError, UsageError
from sparkforge.core.paths import ROOT
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import SHARE
from sparkforge.image.devices import CONTAINERS, GPU
from sparkforge.models import local, recipes
from sparkforge.plan import architecture, budget, capabilities, devices, thresholds
from sparkforge.plan.budget import HOST_WORKING_BYTES, Workload
from sparkforge.serve import profiles, settings, status
from sparkforge.serve.devices.choose import choose
from sparkforge.serve.record import checked_flags

GB = 1e9
# A model is planned for this many tokens, unless fleet.toml sets `context`, and for this many sequences.
CONTEXT, SEQUENCES = 8192, 4
# Names appear in the JSON of requests, in lines of HAProxy's map and as folder names.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]{0,62}$")]
Alias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.:-]{0,62}(/[\w.:-]{1,63})?$")]


class FleetModel(Record):
    """One model. `model` is a recipe, a repository on this machine or a folder; the default is the table's name.

    `memory` is in GB, 0 to compute it; `idle` is in minutes, 0 to never stop the model. If `resident` is not set, the
    model stays resident if the memory suffices.
    """

    model: str = ""
    device: str = "auto"
    profile: str = ""
    context: int = Field(default=0, ge=0)
    memory: float = Field(default=0, ge=0)
    idle: float = Field(default=0, ge=0)
    resident: bool | None = None
    aliases: tuple[Alias, ...] = ()
    flags: Annotated[tuple[str, ...], AfterValidator(checked_flags)] = ()


class FleetConfig(Record):
    """The whole file."""

    schema_: Literal[1] = Field(alias="schema")
    models: dict[Name, FleetModel] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        owners: dict[str, str] = {}
        for model, row in self.models.items():
            for name in names(model, row.aliases):
                if owners.setdefault(name, model) != model:
                    raise ValueError(f"{owners[name]} and {model} both have the name {name}")
        return self


class Member(Record):
    """A model of a running fleet: its names, the bytes that it needs of `pool`, and the arguments of its `./inv up`.

    `folder` holds the checkpoint; it is empty for the tiny model, which `up` makes. `pool` is gpu for a model on a GPU
    with memory of its own, else host. `idle_seconds` is 0 for a model that is never stopped for being idle.
    """

    name: str
    names: tuple[str, ...]
    folder: str
    needed: int
    pool: str
    resident: bool
    idle_seconds: float
    arguments: tuple[str, ...]
    flags: tuple[str, ...]


class Fleet(Record):
    """The arguments of the fleet's process. `free` has the bytes that each pool can give."""

    address: str
    port: int
    key_file: str
    hosts: tuple[str, ...]
    free: dict[str, int]
    members: tuple[Member, ...]
    guard: str = ""


def names(model: str, aliases: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a model in requests: its name and aliases, each with and without `openai/` or its owner."""
    known = dict[str, None]()
    for name in (model, *aliases):
        known |= dict.fromkeys((name, name.partition("/")[2] if "/" in name else f"openai/{name}"))
    return tuple(known)


def read(path: Path) -> FleetConfig:
    """Read a fleet.toml. Raises UsageError if there is none, InputError for one that is malformed."""
    if not path.is_file():
        failure = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        fix = f"less {ROOT / 'docs/guide/fleet.md'}   # an example"
        raise UsageError(failure, "--fleet takes a fleet.toml, which names the models", fix)
    return tables.load(path, FleetConfig)


def make_plan(config: FleetConfig, folder: Path, free: Mapping[str, int], more: Sequence[str] = ()) -> list[Member]:
    """Return the models in the order of the file, each with `resident` decided; relative folders start in `folder`.

    `free` is the result of `free_memory`; `more` are further arguments of each `up`. Raises RefusalError, with figures,
    for models that do not fit together, InputError for a model that is not on this machine, UsageError for an unknown
    profile or device.
    """
    members = [_member(name, row, folder, free, more) for name, row in config.models.items()]
    for pool, size in free.items():
        own = [member for member in members if member.pool == pool]
        choices = {member.name: config.models[member.name].resident for member in own}
        stays = [member for member in own if choices[member.name]]
        for member in own:  # leave memory for the largest of the models that are not resident
            others = [other.needed for other in own if other not in (*stays, member)]
            if choices[member.name] is None and _sum(stays) + member.needed + max(others, default=0) <= size:
                stays.append(member)
        largest = max((member.needed for member in own if member not in stays), default=0)
        if _sum(stays) + largest > size:
            rows = [f"{m.name}: {m.needed / GB:.1f} GB{', resident' if m in stays else ''}" for m in own]
            why = f"{(_sum(stays) + largest) / GB:.1f} GB are needed at once, {size / GB:.1f} GB are available ({pool})"
            fix = (
                "again   # fewer `resident = true`, a smaller `memory` or `context` in fleet.toml, or end "
                "other programs"
            )
            failure = "the models do not fit this machine together"
            raise RefusalError(failure, "\n        ".join([why, *rows]), fix, code="validation.too-large")
        members = [m.model_copy(update={"resident": m in stays}) if m in own else m for m in members]
    return members


def free_memory() -> dict[str, int]:
    """Return the bytes free for models: the host's, without the memory guard's reserve, and those of a separate GPU."""
    limits = thresholds.configured(os.environ)
    reserved = limits.end_below(psutil.virtual_memory().total) if limits else 0
    free = {"host": memory.measure().available - reserved}
    gpus = status.gpus()
    if gpus and gpus[0].total is not None and gpus[0].used is not None:
        free[GPU] = gpus[0].total - gpus[0].used
    return free


def _member(name: str, row: FleetModel, folder: Path, free: Mapping[str, int], more: Sequence[str]) -> Member:
    known, model, device = recipes.load(), row.model or name, choose(row.device).device
    flags = list(row.flags)
    if recipe := known.get(model):
        named = [model]
        place = str(local.find(recipe.repository, os.environ)) if recipe.repository else ""
    else:
        place = settings.checkpoint(model, str(folder / model))
        if not Path(place).is_dir():
            why = f"{model} is neither a recipe ({', '.join(known)}) nor a repository or folder below {folder}"
            raise InputError(f"there is no model for {name}", why, "./inv list; ./inv models", code="input.model")
        named = ["--model", place]
    weights = sum(file.stat().st_size for file in Path(place).glob("*.safetensors")) if place else 0
    pool, needed = "host", int(row.memory * GB) or weights + HOST_WORKING_BYTES
    if device in (GPU, CONTAINERS[0]):
        pool = GPU if GPU in free else "host"
        machine = devices.this_machine(status.gpus()[0].name)
        host = int(machine.host.value * devices.GIB)
        if not row.memory and place:
            sizes = architecture.read(Path(place))
            default = capabilities.find(os.environ, 0)[1].profile if device == GPU else machine.profiles[0]
            profile = profiles.named(row.profile or default, family=settings.family(place))
            load = profile.options().load(
                Workload(row.context or min(CONTEXT, sizes.longest), SEQUENCES, sequences=SEQUENCES)
            )
            lines = budget.share_lines(sizes, machine, replace(load, sequences=SEQUENCES), weights or None)
            needed = host + sum(line.bytes for line in lines)
        flags = [f"{SHARE}={math.ceil(100 * (needed - host) / machine.memory_bytes) / 100:.2f}", *flags]
    options = {"--device": device, "--profile": row.profile, "--context": str(row.context or "")}
    arguments = (*named, *more, *(word for option, value in options.items() if value for word in (option, value)))
    return Member(
        name=name, names=names(name, row.aliases), folder=place, needed=needed, pool=pool, resident=False,
        idle_seconds=60 * row.idle, arguments=arguments, flags=tuple(flags),
    )  # fmt: skip


def _sum(members: Iterable[Member]) -> int:
    return sum(member.needed for member in members)
