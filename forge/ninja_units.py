"""A ninja build whose compilations go through the planner: `forge.jobs` runs them, ninja records them and links.

Ninja does not know what was built past it: with ccache in the commands it takes each object from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge import jobs, memory, orphans
from forge.diagnosis import explained
from forge.jobs import Plan, Report, Unit
from forge.kernel_progress import Progress
from forge.ninjafile import COMPILERS
from forge.peaks import Peaks
from sparkforge.errors import CommandError
from sparkforge.process import run


@dataclass(frozen=True)
class Site:
    """Where units are built: variables added to ours, a folder for their logs, the lock that compilers hold.

    `limit` is the most jobs that the user wants, None for as many as fit.
    """

    env: Mapping[str, str]
    logs: Path
    lock: Path
    limit: int | None = None


def _by_folder(folder: Path, output: str) -> str:
    return f"{folder.name}/{Path(output).name}"


def found(
    folder: Path,
    ninja: Path,
    rules: Sequence[str] = COMPILERS,
    *,
    named: Callable[[Path, str], str] = _by_folder,
) -> list[Unit]:
    """Return the compilations of `folder`/build.ninja, those of `rules`, as a shell would run them.

    `named` makes a unit's name of the folder and the object; FOLDER/OBJECT unless told otherwise. Raises CommandError
    if ninja cannot read the file.
    """
    told = run([ninja, "-C", folder, "-t", "compdb", *rules]).stdout
    return [
        Unit(named(folder, row["output"]), ("sh", "-c", row["command"]), Path(row["directory"]))
        for row in json.loads(told)
    ]


def pending(ninja: Sequence[str | Path], *targets: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the commands that `ninja`, with its options, would run for `targets`. Raises CommandError."""
    told = run([*ninja, "-n", "-v", *targets], env={**(env or {}), "NINJA_STATUS": "[%f/%t] "}).stdout
    return [line.partition("] ")[2] for line in told.splitlines() if line.startswith("[")]


def build(units: Sequence[Unit], peaks: Peaks, site: Site, link: Callable[[Plan], object]) -> tuple[Report, Plan]:
    """Run `units` as memory allows, then `link`, which has ninja do the rest; return what was done and the schedule.

    Raises what `jobs.run` raises; a CommandError says what a compiler's complaint means, where that is known.
    """
    schedule = jobs.plan([unit.name for unit in units], peaks, memory.measure(), limit=site.limit)
    report = Report()
    with Progress(schedule) as progress:
        try:
            if units:
                progress.begin()
                held = [orphans.holding(site.lock, unit) for unit in units]
                report = jobs.run(held, schedule, peaks, env=site.env, logs=site.logs, watch=progress.watch)
            link(schedule)
        except CommandError as error:
            raise explained(error) from None
    return report, schedule
