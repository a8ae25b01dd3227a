"""What a build of kernels shows: one bar in CPU-seconds of measured history, a line for each unit that ended."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich import progress as bars

from forge.jobs import Done, Plan, Stage, Unit
from sparkforge.console import console, say

SHOWN = 60  # characters of a unit's name
WORDS = {"done": "compiled", "cached": "from ccache", "killed": "killed: out of memory", "failed": "failed"}


class Progress:
    """Follows one run of `jobs.run`; a terminal gets a bar as well."""

    def __init__(self, schedule: Plan) -> None:
        self.plan, self.ended = schedule, set[str]()
        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TextColumn("{task.fields[left]}"))
        self.bar = bars.Progress(*columns, console=console(), transient=True, disable=not sys.stderr.isatty())
        self.task = self.bar.add_task("", total=sum(cost.cpu for cost in schedule.costs.values()) or 1, left="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def begin(self) -> None:
        """Say what lies ahead."""
        budget, count = self.plan.budget / 1e9, len(self.plan.costs)
        told = f"{count} units, at most {self.plan.jobs} at once within {budget:.1f} GB"
        say(f"{told}; about {_time(self.plan.seconds())}, less where ccache has them")

    def watch(self, stage: Stage, unit: Unit, done: Done | None) -> None:
        """Take an event of `jobs.run`."""
        if done is None:
            self.bar.update(self.task, description=_short(unit.name))
            return
        if stage in ("done", "cached"):
            self.ended.add(unit.name)
            self.bar.advance(self.task, self.plan.costs[unit.name].cpu)
        left = _time(self.plan.seconds(self.ended))
        self.bar.update(self.task, left=f"about {left} left")
        peak = f", {done.usage.peak / 1e9:.2f} GB" if stage == "done" else ""
        told = f"{_short(unit.name)}: {WORDS[stage]} ({done.seconds:.1f} s{peak}; {left} left)"
        say(f"[{len(self.ended)}/{len(self.plan.costs)}] {told}")


def _short(name: str) -> str:
    """Return a unit's name, cut in its middle so that module and file can both be told."""
    return name if len(name) <= SHOWN else f"{name[: SHOWN // 2 - 1]}…{name[-SHOWN // 2 :]}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
