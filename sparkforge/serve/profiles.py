"""Serve profiles (profiles.toml): from a profile's name to vLLM's flags and variables, each with its reason.

It also checks, before a download, whether a stack and this machine's memory can serve a recipe.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

import psutil
from pydantic import Field, StringConstraints, model_validator

from sparkforge.core import memory, tables
from sparkforge.core.errors import RefusalError, UsageError
from sparkforge.core.tables import Record
from sparkforge.core.vllm_flags import QUANTIZATION, flag_value, split_flag
from sparkforge.image.devices import DOCKER, GPU
from sparkforge.models import recipes
from sparkforge.models.recipes import Recipe
from sparkforge.plan import budget, devices, families
from sparkforge.plan.budget import Workload
from sparkforge.plan.choose import ServerOptions
from sparkforge.plan.devices import GIB, Device
from sparkforge.plan.families import Family, Reason
from validate.facts import gpu

TABLE = Path(__file__).with_name("profiles.toml")
OUR_EXPERTS = "spark-mxfp4"  # vLLM's name of our plugin's quantization method, and our GPU profile with it
CHECKPOINT_FORMAT = "mxfp4"  # vLLM's name of the format that our expert kernels read
KERNEL_VARIABLE = "SPARK_MXFP4_KERNEL"  # as in spark_mxfp4.registry, which imports torch
FAMILIES_VARIABLE = "SPARK_MXFP4_FAMILIES"  # as in spark_mxfp4.vllm.plugin
Flag = Annotated[str, StringConstraints(pattern=r"^--[^=\s]+$")]


class ServeProfile(Record):
    """vLLM's settings for one use; `extends` names a profile or base. With `family` it has the flags of the family."""

    about: str = ""
    extends: str = ""
    family: bool = False
    device: Literal["", "embedded", "gpu"] = ""  # empty: a Spark; inherited by `extends`
    flags: dict[Flag, Reason] = Field(default_factory=dict)
    environment: dict[str, Reason] = Field(default_factory=dict)

    def merge(self, base: Self) -> Self:
        """Return this profile, with `base`'s settings where it has none."""
        return type(self)(
            about=self.about or base.about,
            extends=self.extends or base.extends,
            family=self.family or base.family,
            device=self.device or base.device,
            flags={**base.flags, **self.flags},
            environment={**base.environment, **self.environment},
        )

    def arguments(self) -> tuple[str, ...]:
        """Return the flags as arguments."""
        return tuple(f"{flag}={setting.value}" if setting.value != "" else flag for flag, setting in self.flags.items())

    def options(self) -> ServerOptions:
        """Return the profile's settings for a plan."""
        return ServerOptions(about=self.about, arguments=self.arguments(), variables=self.variables())

    def replaced_by(self, flags: Sequence[str]) -> Iterator[str]:
        """Yield a line for each flag of the profile that a user's flags replace."""
        for word in flags:
            name, _ = split_flag(word)
            own = next((flag for flag in self.flags if name in {flag, flag.replace("--", "--no-", 1)}), "")
            if own:
                value = f" ({self.flags[own].value})" if self.flags[own].value != "" else ""
                yield f"{word.partition('=')[0]} replaces the profile's {own}{value}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables."""
        return {name: str(setting.value) for name, setting in self.environment.items()}


class StackProfiles(Record):
    """Profiles of one stack: settings that override the profile of the same name, or further profiles."""

    profiles: dict[str, ServeProfile] = Field(default_factory=dict)


class ServeProfiles(Record):
    """The table: profiles, bases that profiles extend, and the stacks' overrides."""

    profiles: dict[str, ServeProfile]
    bases: dict[str, ServeProfile] = Field(default_factory=dict)
    stacks: dict[str, StackProfiles] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for table in (self, *map(self.on_stack, self.stacks)):
            for name in table.profiles:
                if not table.resolve(name).about:
                    raise ValueError(f"{name} has no 'about'")
        return self

    def on_stack(self, stack: str) -> Self:
        """Return the table with a stack's overrides."""
        own = self.stacks.get(stack, StackProfiles())
        changed = {name: p.merge(self.profiles.get(name, ServeProfile())) for name, p in own.profiles.items()}
        return self.model_copy(update={"profiles": {**self.profiles, **changed}, "stacks": {}})

    def for_family(self, family: Family) -> Self:
        """Return the table for a family's models: with its flags and our experts, without what it does not support."""

        def changed(name: str, profile: ServeProfile) -> ServeProfile:
            flags = profile.flags | (family.flags() if profile.family else {})
            flags = {flag: value for flag, value in flags.items() if flag not in family.without}
            environment = {key: value for key, value in profile.environment.items() if key not in family.without}
            if why := family.experts and family.experts.ours.get(name):
                environment[FAMILIES_VARIABLE] = Reason(value="on", why=why)
            return profile.model_copy(update={"flags": flags, "environment": environment})

        rows = {"profiles": self.profiles, "bases": self.bases}
        return self.model_copy(
            update={kind: {name: changed(name, row) for name, row in table.items()} for kind, table in rows.items()}
        )

    def resolve(self, name: str, below: tuple[str, ...] = ()) -> ServeProfile:
        """Return a profile with its inherited settings. Raises ValueError for an unknown or circular `extends`."""
        table: Mapping[str, ServeProfile] = {**self.bases, **self.profiles}
        if name in below or name not in table:
            raise ValueError(f"{below[-1] if below else name} extends {name!r}, which is circular or missing")
        profile = table[name]
        if not profile.extends:
            return profile
        resolved = profile.merge(self.resolve(profile.extends, (*below, name)))
        return resolved.model_copy(update={"about": profile.about, "extends": ""})


def load(table: Path = TABLE, *, stack: str = "", family: str = "") -> dict[str, ServeProfile]:
    """Read every profile for `stack` and `family`, by default that of the default models. Raises InputError."""
    row = families.load()[family or families.default()]
    document = tables.load(table, ServeProfiles).on_stack(stack).for_family(row)
    return {name: document.resolve(name) for name in document.profiles}


def load_options(*, stack: str = "", family: str = "") -> dict[str, ServerOptions]:
    """Read every profile as plans read it. Raises InputError as `load` does."""
    return {name: profile.options() for name, profile in load(stack=stack, family=family).items()}


def named(name: str, table: Path = TABLE, *, stack: str = "", family: str = "") -> ServeProfile:
    """Return one profile as `load` does. Raises UsageError, with the known names, for an unknown one."""
    profiles = load(table, stack=stack, family=family)
    if name not in profiles:
        why = f"choose from {', '.join(profiles)} (sparkforge/serve/{TABLE.name})"
        fix = f"./inv up --profile {next(iter(profiles), 'safe')}"
        raise UsageError(f"no serve profile {name!r}", why, fix)
    return profiles[name]


def with_quantization(
    quantization: str, profile: str, flags: Sequence[str], *, gpu: bool, stack: str = ""
) -> tuple[str, tuple[str, ...]]:
    """Return the profile and vLLM's flags for --quantization; if it is empty, the given ones.

    mxfp4 is the checkpoint's own format, so it changes nothing, as in a container (entrypoint.py). spark-mxfp4 without
    a profile chooses the profile of that name, or without a GPU `embedded`, which has our experts already. With a
    profile it becomes a vLLM flag after the profile's. Raises UsageError for another name, if the flags contain
    --quantization too, and for a profile that leaves the experts to vLLM.
    """
    if quantization in ("", CHECKPOINT_FORMAT):
        return profile, tuple(flags)
    if quantization != OUR_EXPERTS:
        why = f"it takes {OUR_EXPERTS} (our kernels) or {CHECKPOINT_FORMAT} (the checkpoint's); others follow --"
        fix = f"--quantization {OUR_EXPERTS}   # others: ./inv up -- {QUANTIZATION} {quantization[:40]}"
        raise UsageError(f"--quantization {quantization[:40]!r} is not known", why, fix)
    short = next((word for word in flags if word.startswith("-q")), None)  # vLLM's short form: -q NAME, -qNAME
    if short or flag_value(flags, QUANTIZATION) is not None:
        failure = f"{short or QUANTIZATION} is also among the flags after --"
        raise UsageError(failure, "both choose the quantization", "without --quantization")
    if not profile:
        return OUR_EXPERTS if gpu else "embedded", tuple(flags)
    known = load(stack=stack)  # an unknown profile is refused where it is read
    if profile in known and known[profile].variables().get(KERNEL_VARIABLE) == "vllm":
        why = f"it sets {KERNEL_VARIABLE}=vllm: our plugin computes its dense layers, and vLLM the experts"
        fix = f"without --profile   # our experts; or without {QUANTIZATION}"
        raise UsageError(f"{QUANTIZATION} {OUR_EXPERTS} has no effect with --profile {profile}", why, fix)
    return profile, (*flags, f"{QUANTIZATION}={OUR_EXPERTS}")


def require_recipe(name: str, recipe: Recipe, stack: str, device: str, context: int = 0) -> None:
    """Raise UsageError for a recipe of other stacks, RefusalError if it does not fit; `context` 0 is the profile's."""
    if stack not in recipe.stacks:
        fix = recipes.advice(recipes.weights(recipe).weight_bytes(), lambda other: stack in other.stacks)
        why = f"it is for {', '.join(recipe.stacks)}"
        raise UsageError(f"the recipe {name} is not for the stack {stack}", why, fix)
    with_gpu = device in (DOCKER, GPU)
    free, total = memory.measure().available, psutil.virtual_memory().total
    with suppress(UsageError):  # a GPU that no plan knows is judged by the validator
        machine = devices.describe(gpu.name() if with_gpu else "", total, free, None)
        require_fit(name, recipe, stack, machine, "" if with_gpu else devices.CPU_PROFILES[0], context)


def require_fit(name: str, recipe: Recipe, stack: str, machine: Device, profile: str = "", context: int = 0) -> None:
    """Raise RefusalError if weights and one longest sequence do not fit; an empty `profile` is the recipe's."""

    def missing(other: Recipe) -> int:
        options = load(stack=stack, family=other.family)[profile or other.profile].options()
        model = recipes.weights(other)
        longest = min(context or options.longest(model.longest), model.longest)
        return budget.missing(model, machine, replace(options.load(Workload(longest)), concurrency=1))

    if (lacking := missing(recipe)) > 0:
        size, used = recipes.weights(recipe).weight_bytes() / GIB, machine.resident.value
        why = f"{lacking / GIB:.1f} GiB are missing: its weights are {size:.1f} GiB, and "
        why += f"{used:.1f} of {machine.memory.value:.1f} GiB are in use"
        fix = recipes.advice(fits=lambda other: stack in other.stacks and missing(other) <= 0)
        raise RefusalError(f"{name} does not fit {machine.about}", why, fix, code="validation.too-large")
