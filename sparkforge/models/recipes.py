"""Recipes: one file for each model in sparkforge/recipes, with its repository, flags and evidence."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.box import SIMPLE
from rich.table import Table

from sparkforge.core import tables
from sparkforge.core.console import console, echo_json, say
from sparkforge.core.errors import InputError, on
from sparkforge.core.tables import Record
from sparkforge.plan import architecture, families
from sparkforge.plan.architecture import Architecture, Draft, KnownModel
from sparkforge.plan.families import Reason

FOLDER = Path(__file__).parents[1] / "recipes"
UNKNOWN = "unknown"  # a revision that we could not read: the hub's main branch is fetched


class Shown(Record):
    """One piece of evidence for a recipe: the claim, the machine, and the source or command."""

    what: str = Field(min_length=1)
    where: str = Field(min_length=1)
    how: str = Field(min_length=1)


class MemoryPlan(Record):
    """The planned use of a recipe: a row of devices.toml, tokens per sequence, concurrent sequences, machines."""

    device: str
    context: int = Field(ge=1)
    concurrency: int = Field(ge=1)
    machines: int = Field(default=1, ge=1)


class Recipe(KnownModel):
    """A model to serve. `repository` is OWNER/NAME, empty for a checkpoint that we write.

    `revision` is a commit or `unknown`, with its source. `profile` is the serve profile on a Spark; `flags` follow the
    profile's flags, each with a reason. `shown` is empty if there is no evidence.
    """

    about: str
    repository: str = Field(default="", pattern=r"^([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)?$")
    revision: str = Field(default=UNKNOWN, pattern=r"^([0-9a-f]{40}|unknown)$")
    revision_source: str = ""
    family: str
    stacks: tuple[str, ...] = Field(min_length=1)
    profile: str
    flags: dict[str, Reason] = Field(default_factory=dict)
    plan: MemoryPlan
    shown: tuple[Shown, ...] = ()

    def arguments(self) -> tuple[str, ...]:
        """Return the flags as arguments."""
        return tuple(f"{flag}={reason.value}" if reason.value != "" else flag for flag, reason in self.flags.items())


def load(folder: Path = FOLDER) -> dict[str, Recipe]:
    """Return every recipe by name. Raises InputError."""
    return {file.stem: read(file) for file in sorted(folder.glob("*.toml"))}


@cache
def read(file: Path) -> Recipe:
    """Read one recipe. Raises InputError, also if its configuration is of another family."""
    recipe = tables.load(file, Recipe)
    if recipe.family != families.name_of(recipe.config, file.name):
        why = f"family is {recipe.family!r}, its config is of {families.name_of(recipe.config, file.name)}"
        raise InputError(f"{file.name} is malformed", why, on("less", file, "correct it"), code="input.table")
    return recipe


def named(name: str) -> Recipe:
    """Return one recipe. Raises InputError, which lists the known names, for an unknown one."""
    known = load()
    if name not in known:
        why = f"choose from {', '.join(known)}"
        raise InputError(f"there is no recipe {name[:80]!r}", why, families.LIST, code="input.config")
    return known[name]


def of_repository(repository: str) -> Recipe | None:
    """Return the recipe of a repository; None if there is none. Raises InputError."""
    return next((recipe for recipe in load().values() if recipe.repository == repository), None)


def draft_of(repository: str) -> tuple[str, Draft] | None:
    """Return the draft of this repository with its recipe's name; None if there is none. Raises InputError."""
    drafts = ((name, draft) for name, recipe in load().items() for draft in recipe.drafts.values())
    return next(((name, draft) for name, draft in drafts if draft.repository == repository), None)


def pinned_revision(repository: str) -> str:
    """Return the revision pinned for a repository; empty if there is none. Raises InputError."""
    recipe = of_repository(repository)
    return recipe.revision if recipe and recipe.revision != UNKNOWN else ""


def repositories(name: str) -> tuple[str, ...]:
    """Return the repository of the recipe of this name; empty if there is none."""
    recipe = load().get(name)
    return (recipe.repository,) if recipe and recipe.repository else ()


def differences(config: Mapping[str, Any], repository: str) -> list[str]:
    """Return the differences of a config.json from a recipe's; `repository` may also be the recipe's name."""
    recipe = of_repository(repository) or (load().get(repository) if "/" not in repository else None)
    expected = recipe.config if recipe else {}
    simple = {key: value for key, value in expected.items() if not isinstance(value, dict)}
    different = {key: value for key, value in simple.items() if config.get(key) != value}
    return [f"{key} {str(config.get(key))[:40]} instead of {value}" for key, value in different.items()]


def nearest(size: float = math.inf, fits: Callable[[Recipe], bool] = lambda _recipe: True) -> str:
    """Return the recipe that `fits` accepts with weights nearest to `size` bytes; empty if there is none."""
    known = {name: recipe for name, recipe in load().items() if recipe.repository and fits(recipe)}
    sizes = {name: architecture.parse(recipe.config, name).weight_bytes() for name, recipe in known.items()}
    return min(sizes, key=lambda name: abs(math.log(sizes[name] / min(max(size, 1.0), 1e13))), default="")


def advice(size: float = math.inf, fits: Callable[[Recipe], bool] = lambda _recipe: True) -> str:
    """Return the next command after a refusal: the plan of the nearest recipe, or the list of recipes."""
    name = nearest(size, fits)
    return f"./inv plan {name}   # the nearest recipe: {load()[name].about}" if name else families.LIST


def report(*, as_json: bool) -> None:
    """Print every family and recipe, with its evidence."""
    if as_json:
        recipes = {name: recipe.model_dump(mode="json", exclude={"config"}) for name, recipe in load().items()}
        names = {"about", "model_type", "experts"}
        rows = {name: row.model_dump(mode="json", include=names) for name, row in families.load().items()}
        echo_json({"families": rows, "recipes": recipes})
        return
    table = Table("family", "what it is", "weights in", title="families", box=SIMPLE)
    for name, row in families.load().items():
        table.add_row(name, row.about, ", ".join(row.quantization))
    console().print(table)
    table = Table("recipe", "family", "GB", "stacks", "revision", title="recipes", box=SIMPLE)
    for name, recipe in load().items():
        size, revision = weights(recipe).weight_bytes() / 1e9, recipe.revision[:12] if recipe.repository else "ours"
        table.add_row(name, recipe.family, f"{size:.1f}", ", ".join(recipe.stacks), revision)
    console().print(table)
    for name, recipe in load().items():
        shown = "; ".join(f"{row.what} ({row.where}; {row.how})" for row in recipe.shown)
        experts = families.load()[recipe.family].experts
        backends = " or ".join({*experts.backends.get("12.1", {}).values()} if experts else ())
        more = f"; vLLM's selector returns {backends} for its experts on a Spark" if backends else ""
        say(f"{name}: {shown or 'no evidence'}{more}")


def weights(recipe: Recipe) -> Architecture:
    """Return the recipe's sizes. Raises InputError."""
    return architecture.parse(recipe.config, recipe.repository or recipe.about)
