"""Whether a recipe can be served here: on the stack, and in this machine's memory, before anything is downloaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import psutil

from sparkforge.core import memory
from sparkforge.core.errors import RefusalError, UsageError
from sparkforge.image.devices import DOCKER, GPU
from sparkforge.models import recipes
from sparkforge.models.recipes import Recipe
from sparkforge.plan import budget, devices
from sparkforge.plan.budget import Workload
from sparkforge.plan.devices import GIB, Device
from sparkforge.serve import profiles
from validate.facts import gpu


def require(name: str, recipe: Recipe, stack: str, device: str, context: int = 0) -> None:
    """Raise UsageError for a recipe of other stacks, RefusalError for one that this machine's memory does not hold.

    Both name the nearest recipe that can be served. `context` is --max-model-len, 0 for the profile's.
    """
    size = recipes.weights(recipe).weight_bytes()
    if stack not in recipe.stacks:
        fix = recipes.advice(size, lambda other: stack in other.stacks)
        raise UsageError(
            f"the recipe {name} is not for the stack {stack}", f"it is for {', '.join(recipe.stacks)}", fix
        )
    with_gpu = device in (DOCKER, GPU)
    free, total = memory.measure().available, psutil.virtual_memory().total
    with suppress(UsageError):  # a GPU that no plan knows is judged by the validator
        machine = devices.describe(gpu.name() if with_gpu else "", total, free, None)
        require_fit(name, recipe, stack, machine, "" if with_gpu else devices.CPU_PROFILES[0], context)


def require_fit(name: str, recipe: Recipe, stack: str, machine: Device, profile: str = "", context: int = 0) -> None:
    """Raise RefusalError if one sequence of the longest length does not fit the machine beside the weights.

    `profile` is the serve profile, empty for the recipe's.
    """

    def missing(other: Recipe) -> int:
        rows = profiles.load(stack=stack, family=other.family)
        options = rows[profile or other.profile].options()
        model = recipes.weights(other)
        longest = min(context or options.longest(model.longest), model.longest)
        return budget.missing(model, machine, replace(options.load(Workload(longest)), concurrency=1))

    if (lacking := missing(recipe)) > 0:
        size = recipes.weights(recipe).weight_bytes() / GIB
        raise RefusalError(
            f"{name} does not fit {machine.about}",
            f"{lacking / GIB:.1f} GiB are missing: its weights are {size:.1f} GiB, and "
            f"{machine.resident.value:.1f} of {machine.memory.value:.1f} GiB are in use",
            recipes.advice(fits=lambda other: stack in other.stacks and missing(other) <= 0),
            code="validation.too-large",
        )
