"""A ninja build whose compilations are scheduled by memory: `jobs` runs them, then ninja records them and links.

Ninja has no record of objects that it did not build itself, so it runs the commands again, and ccache has the results.

Compilers outlive a killed build and write files that the next build reads. So each unit holds a lock while one of its
compilers runs (flock(2)), and the next build first waits for that lock.
"""

import fcntl
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.compile import jobs
from sparkforge.compile.jobs import JobsReport, Schedule, Site, Stage, Unit, UnitResult
from sparkforge.core import memory
from sparkforge.core.console import say
from sparkforge.core.errors import ProcessError
from sparkforge.core.files import parse_json, read_toml
from sparkforge.core.process import run

MESSAGES = Path(__file__).with_name("diagnosis.toml")
COMPILERS = ("compile", "cuda_compile")  # FlashInfer's rules that make an object (flashinfer/jit/cpp_ext.py)
NAME_WIDTH = 60  # characters of a unit's name
OUTCOMES = {"done": "compiled", "cached": "from ccache", "killed": "killed: out of memory", "failed": "failed"}


@dataclass(frozen=True)
class BuildResult:
    """The result of a build: units compiled, units from ccache, all units; wall and CPU-seconds.

    `peak` is the largest sampled sum of resident sizes, `budget` the limit for that sum, both in bytes.
    """

    compiled: int
    cached: int
    units: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak: int = 0
    budget: int = 0
    jobs: int = 0

    def __str__(self) -> str:
        return f"{self.compiled} of {self.units} units compiled, {self.cached} from ccache"


def read_units(
    folder: Path, ninja: str | Path, rules: Sequence[str] = COMPILERS, *, unit_name: Callable[[str], str] | None = None
) -> list[Unit]:
    """Return the compilations of `rules` in `folder`/build.ninja as shell commands.

    `unit_name` makes a unit's name from its object, FOLDER/OBJECT by default. Raises ProcessError if ninja cannot read
    the file.
    """
    name = unit_name or (lambda output: f"{folder.name}/{Path(output).name}")
    answer = run([ninja, "-C", folder, "-t", "compdb", *rules]).stdout
    return [
        Unit(name(row["output"]), ("sh", "-c", row["command"]), Path(row["directory"]))
        for row in parse_json(answer, f"ninja's answer about {folder}")
    ]


def pending(ninja: Sequence[str | Path], *targets: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the commands that `ninja`, with its options, would run for `targets`. Raises ProcessError."""
    output = run([*ninja, "-n", "-v", *targets], env={**(env or {}), "NINJA_STATUS": "[%f/%t] "}).stdout
    return [line.partition("] ")[2] for line in output.splitlines() if line.startswith("[")]


def build(units: Sequence[Unit], commands: set[str], site: Site, link: Callable[[Schedule], object]) -> BuildResult:
    """Run the `units` whose command is in `commands`, as memory allows, then `link` with the schedule.

    `link` lets ninja do the rest. Raises the errors of `jobs.run`; a ProcessError explains known messages of
    compilers.
    """
    wanted = [unit for unit in units if unit.command[-1] in commands]
    schedule = jobs.make_schedule([unit.name for unit in wanted], memory.measure(), limit=site.limit)
    report = JobsReport()
    progress = CompileProgress(schedule)
    try:
        if wanted:
            report = jobs.run(wanted, schedule, site, progress.watch)
        link(schedule)
    except ProcessError as error:
        raise explained(error) from None
    cached = sum(result.cached for result in report.units.values())
    return BuildResult(
        compiled=len(report.units) - cached, cached=cached, units=len(units), peak=report.peak,
        cpu_seconds=round(report.cpu_seconds, 1), budget=schedule.budget, jobs=schedule.jobs,
    )  # fmt: skip


def explained(error: ProcessError) -> ProcessError:
    """Return the error with cause and fix instead of the compiler's output if they are known, else unchanged."""
    for row in read_toml(MESSAGES)["message"]:
        if match := re.search(row["pattern"], error.why):
            why, fix = (row[part].format(match=match[0], **match.groupdict()) for part in ("why", "fix"))
            return ProcessError(error.what, why, fix, code="process.failed")
    return error


def wait_for_orphans(lock: Path) -> None:
    """Wait until no compiler of a killed build holds `lock`.

    Call it before any run of ninja: even `ninja -n` removes depfiles (seen with 1.13), and ccache does not store the
    result of a compiler whose depfile was removed.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("compilers of a killed build are still running; waiting for them to end")
            fcntl.flock(file, fcntl.LOCK_EX)


class CompileProgress:
    """Prints the number of units of `jobs.run` and their expected time, then a line for each that ended."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.ended = schedule, set[str]()
        if schedule.costs:
            bounds = f"at most {schedule.jobs} at once within {schedule.budget / 1e9:.1f} GB"
            about = f"about {_duration(schedule.seconds())}, less if ccache has them"
            say(f"{len(schedule.costs)} units, {bounds}; {about}")

    def watch(self, stage: Stage, unit: Unit, result: UnitResult | None) -> None:
        """Handle an event of `jobs.run`."""
        name = unit.name
        if len(name) > NAME_WIDTH:  # keep both module and file
            name = f"{name[: NAME_WIDTH // 2 - 1]}…{name[-NAME_WIDTH // 2 :]}"
        if result is None:
            return
        if stage in ("done", "cached"):
            self.ended.add(unit.name)
        left = _duration(self.schedule.seconds(self.ended))
        peak = f", {result.usage.peak / 1e9:.2f} GB" if stage == "done" else ""
        count = f"[{len(self.ended)}/{len(self.schedule.costs)}]"
        say(f"{count} {name}: {OUTCOMES[stage]} ({result.seconds:.1f} s{peak}; {left} left)")


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
