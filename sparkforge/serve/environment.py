"""Prepare the runtime of the embedded device: make its environment."""

from __future__ import annotations

from sparkforge import environments, pins
from sparkforge.core.console import Steps
from sparkforge.environments import Environment
from sparkforge.image.devices import EMBEDDED, stack_of


def prepare(steps: Steps, env: Environment | None = None) -> Environment:
    """Make `env`, by default the embedded device's, unless it is there and current, and return it.

    Raises the errors of `environments.ensure`.
    """
    table, env = pins.load(), env or Environment(stack_of(EMBEDDED))
    with steps.step("environment", "hash-locked wheels; the first time takes minutes") as tell:
        is_new = environments.ensure(env, table)
        patched = [table.component(*name.split("/")) for name in table.environment(env.name).wheels]
        versions = [
            f"{component.package} {environments.installed_version(component)}"
            for component in patched
            if component.patches
        ]
        tell(", ".join([*versions, "made" if is_new else "unchanged"]))
    return env
