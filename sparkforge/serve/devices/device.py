"""The interface of a device, and `start`, which runs its steps in order."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from sparkforge.core import paths
from sparkforge.core.console import Steps, say
from sparkforge.core.errors import ServerError, SparkforgeError
from sparkforge.core.files import write_json
from sparkforge.serve import first_answers, launch, logs, record, settings
from sparkforge.serve.record import Server, StartPlan

UNPROVED = "this start is not recorded as known good: its validation could not refuse it (SPARKFORGE_VALIDATE)"


class Device(ABC):
    """Runs the server of one plan. The constructor checks the plan and the variables, before minutes are spent.

    `start` below calls `prepare`, `validate` and `start`; a cluster's node calls the same methods one by one.
    """

    command: ClassVar[str] = "./inv up"  # named in errors as the command to run again
    step_count: ClassVar[int] = 4

    def __init__(self, plan: StartPlan) -> None:
        settings.judge(os.environ)
        self.plan, self.steps = plan, Steps(self.step_count)

    @abstractmethod
    def prepare(self) -> None:
        """Make what is missing: the environment or the image, and the model."""

    @abstractmethod
    def validate(self) -> str:
        """Validate machine, software and model; return the verdict in a line. Raises RefusalError if they fail."""

    @abstractmethod
    def start(self) -> Server:
        """Start, record, test and return the server. Raises ServerError or RefusalError; then nothing runs."""

    def try_tiny(self, serve: Callable[[Callable[[str], None]], Server], end: Callable[[], object]) -> None:
        """Serve the tiny model with `serve`, compare its first answers, and `end` it. Raises what these raise."""
        with self.steps.step("first answers", "the tiny model; --no-tiny-first leaves it out") as tell:
            server = serve(tell)
            try:
                difference = first_answers.compare(server.endpoint)
            finally:
                with suppress(SparkforgeError):  # if it has ended by itself, the comparison's error says why
                    end()
            tell(f"the tiny model's tokens are right, its log probabilities differ by {difference:.3f} from float32")

    def remember(self, server: Server) -> None:  # noqa: B027 - a device may have no way back
        """Record a start as known good. Raises OSError or a SparkforgeError."""

    @classmethod
    def stop(cls) -> str:
        """End the server, a start that is under way, and processes of a killed server; return a message about it."""
        try:
            stopped = launch.down()
        except ServerError as error:
            if error.code != "server.not-running":
                raise
            record.forget()
            return "nothing to stop"
        return f"stopped {stopped.where}" if stopped else "ended what was left"

    @classmethod
    def log(cls) -> str:
        """Return what the server printed."""
        return logs.read(record.log_path())

    @classmethod
    def state(cls) -> dict[str, Any]:
        """Return `state`: running, ended or stopped; and why it ended, and whether a signal `asked` for it."""
        server = record.read()
        if server is None:
            return {"state": "stopped"}
        if server.alive:
            return {"state": "running", "pid": server.pid, "milestone": logs.milestone(cls.log())}
        end = record.ended(server)
        why, asked = record.how_it_ended(server), bool(end and end.asked)
        return {"state": "ended", "why": why, "asked": asked, "left": len(record.leftovers())}


def start(device: Device) -> Server:
    """Prepare, validate and start; return the tested server. Raises the device's errors, and then nothing runs."""
    with launch.starting():
        launch.check_free(device.plan.port, device.plan.address, device.command)
        return run(device)


def run(device: Device) -> Server:
    """Do what `start` does, for a caller that holds its lock."""
    device.prepare()
    device.validate()
    server = device.start()
    write_json(paths.state() / "up.json", {"seconds": device.steps.seconds, "model": server.model_id})
    if not device.plan.trial:
        try:
            device.remember(server)
        except (OSError, SparkforgeError) as error:  # such as a full disk, which is no reason to end the server
            say(f"WARNING: this start is not recorded as known good, so ./inv rollback cannot come back to it: {error}")
    return server
