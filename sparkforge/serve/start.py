"""Start a server on any device: what `./inv up` and a bake-off have in common."""

from __future__ import annotations

from sparkforge.core.console import Steps
from sparkforge.image.devices import DOCKER, DOCKER_CPU
from sparkforge.serve import container, embedded, launch
from sparkforge.serve.container import ImageBuilder
from sparkforge.serve.plan import StartPlan
from sparkforge.serve.record import Server


def start(plan: StartPlan, build: ImageBuilder) -> Server:
    """Prepare what is missing, start the server and return it once it has proved itself.

    `build(stack, steps)` makes a missing image. Raises what the device raises; nothing is left running then.
    """
    with launch.starting():
        launch.check_free(plan.port, plan.address)
        if plan.device in {DOCKER, DOCKER_CPU}:
            return container.up(plan, Steps(4), build)
        return embedded.start(plan)
