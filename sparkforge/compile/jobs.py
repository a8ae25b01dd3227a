"""A scheduler for compilers: their number is bound by memory, not only by cores.

`make_schedule` makes a schedule from units, their predicted peaks and the machine; `run` executes it. The
predicted peaks of the running units always fit into the budget: the memory available when the schedule was made or now,
whichever is less, minus a reserve. Of the waiting units that fit, the unit with the highest peak starts first. A
smaller unit that starts before a larger one never delays it: the smaller unit fits beside a running unit whose peak is
at least as high as the larger unit's, so the larger unit fits when that running unit ends.

A compiler that the kernel killed is recognised by its exit code and its output. Its unit is tried once more, alone.
"""

import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from sparkforge.core import interrupt, memory
from sparkforge.core.errors import CompileError, ProcessError, UsageError, on
from sparkforge.core.files import read_toml
from sparkforge.core.memory import Machine
from sparkforge.core.process import TAIL_LINES, Child, Usage, resident_sizes

PEAKS = Path(__file__).with_name("peaks.toml")
RESERVE = 2 << 30  # bytes left for processes that grow during the build; our choice, as in FlashInfer's patch 0001
PAUSE = 0.05  # seconds between two checks of the running programs
SAMPLE = 0.5  # seconds between two samples of resident sizes and of the machine
PATIENCE = 30.0  # seconds to wait, with nothing running, for memory that was available when the schedule was made
VICTIM = "500"  # oom_score_adj: out of memory, the kernel kills a compiler before the served model
# Exit codes for SIGKILL (the kernel) and SIGTERM (earlyoom, systemd-oomd): a shell's 128 + N or Popen's -N.
KILL_CODES = frozenset({-9, 137, -15, 143})
# If cicc or ptxas is killed, nvcc prints "Killed" (exit code 137; 255 in upstream's reports); if cc1plus is killed, g++
# prints "Killed signal terminated program" (exit code 1). The other patterns are messages about refused allocations.
LAST_WORDS = re.compile(
    r"^(sh: .*)?Killed\b|Killed signal terminated program|died due to signal (9|15)\b"
    r"|^cc1plus: out of memory|catastrophic error.*out of memory|virtual memory exhausted|std::bad_alloc",
    re.MULTILINE,
)

Stage = Literal["started", "done", "cached", "killed", "failed"]
UnitObserver = Callable[[Stage, "Unit", "UnitResult | None"], None]


@dataclass(frozen=True)
class Cost:
    """Peak resident size in bytes and CPU-seconds of one unit, and the source of these figures."""

    peak: int
    cpu: float
    source: str = ""


@cache
def cost(unit: str) -> Cost:
    """Return the cost of `unit`, such as "MODULE/FILE.cuda.o", from the first matching row of peaks.toml."""
    rows = read_toml(PEAKS)["unit"]
    row = next(row for row in rows if fnmatch.fnmatchcase(unit, row["match"]))  # the last row matches every unit
    return Cost(row["peak"], row["cpu"], row["source"])


@dataclass(frozen=True)
class Unit:
    """One command to run: a translation unit with its name in peaks.toml, such as MODULE/FILE.cuda.o."""

    name: str
    command: tuple[str, ...]
    cwd: Path = Path()


@dataclass(frozen=True)
class Site:
    """The surroundings of units: additional variables, a folder for logs, the lock that each unit holds while it runs.

    `limit` is the user's maximum of jobs; None allows as many as fit.
    """

    env: Mapping[str, str]
    logs: Path
    lock: Path
    limit: int | None = None


@dataclass(frozen=True)
class Schedule:
    """At most `jobs` units at once, whose predicted peaks fit into `budget` bytes; `costs` are in starting order."""

    jobs: int
    budget: int
    costs: Mapping[str, Cost]
    max_jobs: int  # MAX_JOBS for a build system without scheduling: as many units of the largest peak as fit

    @property
    def oversized(self) -> list[str]:
        """The units that do not fit into the budget even alone."""
        return [unit for unit, cost in self.costs.items() if cost.peak > self.budget]

    def seconds(self, finished: Iterable[str] = ()) -> float:
        """Return the wall time to expect for the units not yet `finished`, taking a CPU-second as a second."""
        waiting, running, clock = Waiting(self, finished), dict[str, float](), 0.0
        while waiting.units or running:
            while (unit := waiting.take(running, self.budget)) is not None:
                running[unit] = clock + self.costs[unit].cpu
            if not running:
                return clock  # the remaining units are oversized
            first = min(running, key=lambda name: running[name])
            clock = running.pop(first)
        return clock


def make_schedule(units: Iterable[str], machine: Machine, *, limit: int | None = None) -> Schedule:
    """Return the schedule for `units` on `machine`; `limit` is the user's maximum of jobs."""
    costs = {unit: cost(unit) for unit in units}
    order = sorted(costs, key=lambda unit: (-costs[unit].peak, -costs[unit].cpu, unit))
    budget, cores = max(0, machine.available - RESERVE), max(1, machine.cores)
    jobs = max(1, min(cores, limit or cores))
    hungriest = max((cost.peak for cost in costs.values()), default=1)
    max_jobs = max(1, min(jobs, budget // max(1, hungriest)))
    return Schedule(jobs, budget, {unit: costs[unit] for unit in order}, max_jobs)


class Waiting:
    """The waiting units, by falling peak, and the choice of the next to start."""

    def __init__(self, schedule: Schedule, finished: Iterable[str] = ()) -> None:
        excluded = frozenset(finished)
        self.jobs = schedule.jobs
        self.costs = schedule.costs
        self.units = [unit for unit in schedule.costs if unit not in excluded]

    def take(self, running: Iterable[str], budget: int) -> str | None:
        """Remove and return the next unit that fits into `budget` bytes together with `running`; None if none does."""
        running = set(running)
        free = budget - sum(self.costs[unit].peak for unit in running)
        fitting = (index for index, unit in enumerate(self.units) if self.costs[unit].peak <= free)
        index = next(fitting, None) if len(running) < self.jobs else None
        return None if index is None else self.units.pop(index)


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit: resources, wall seconds, whether ccache had it, whether it ran a second time."""

    usage: Usage
    seconds: float
    cached: bool = False
    retried: bool = False


@dataclass
class JobsReport:
    """The result of a run: units by name, wall seconds, and the largest sampled sum of all resident sizes in bytes."""

    units: dict[str, UnitResult] = field(default_factory=dict)
    seconds: float = 0.0
    peak: int = 0

    @property
    def cpu_seconds(self) -> float:
        """CPU-seconds of all units."""
        return sum(result.usage.cpu_seconds for result in self.units.values())


def run(
    units: Sequence[Unit],
    schedule: Schedule,
    site: Site,
    watch: UnitObserver = lambda *_: None,
    machine: Callable[[], Machine] = memory.measure,
) -> JobsReport:
    """Run every unit once (a killed one twice), as `schedule` allows; its output goes to a file in the site's logs.

    Raises CompileError before the start for a unit that cannot fit, or later if memory stays short; ProcessError for a
    unit that failed, after the other running units have ended; CompileError for a unit that was killed while it ran
    alone. No process is left running.
    """
    if schedule.oversized:
        raise _too_big(schedule, schedule.oversized[0], machine())
    return _Run({unit.name: unit for unit in units}, schedule, site, watch, machine).all()


@dataclass
class _Started:
    unit: Unit
    child: Child
    log: Path
    statistics: Path  # of ccache
    started_at: float


@dataclass
class _Run:
    units: Mapping[str, Unit]
    schedule: Schedule
    site: Site
    watch: UnitObserver
    machine: Callable[[], Machine]

    def __post_init__(self) -> None:
        self.waiting = Waiting(self.schedule)
        self.running: dict[str, _Started] = {}
        self.again: list[str] = []  # killed once; each runs alone
        self.retried: set[str] = set()
        self.failure: ProcessError | None = None
        self.report = JobsReport()
        self.budget = self.schedule.budget
        self.sampled = self.starved = 0.0

    def all(self) -> JobsReport:
        """Run all units. After a failed unit wait for the running, then raise its error. An exception ends them all."""
        start = time.monotonic()
        try:
            while self.running or (not self.failure and (self.waiting.units or self.again)):
                if time.monotonic() >= self.sampled + SAMPLE:
                    self.sampled = time.monotonic()
                    resident = sum(resident_sizes(started.child.pid for started in self.running.values()).values())
                    self.report.peak = max(self.report.peak, resident)
                    # Memory of running units counts as available, up to the planned amount.
                    self.budget = min(self.schedule.budget, self.machine().available - RESERVE + resident)
                if not self.failure:
                    self._start_fitting()
                for started in list(self.running.values()):
                    if usage := started.child.poll():
                        self._ended(started, usage)
                time.sleep(PAUSE)
        finally:
            for started in self.running.values():
                started.child.end()
            self.report.seconds = time.monotonic() - start
        if self.failure:
            raise self.failure
        return self.report

    def _start_fitting(self) -> None:
        if self.again:
            if not self.running:
                self._start(self.again.pop(0))
            return
        while (name := self.waiting.take(self.running, self.budget)) is not None:
            self._start(name)
        if self.running or not self.waiting.units:
            self.starved = 0.0
        elif not self.starved:
            self.starved = time.monotonic()
        elif time.monotonic() > self.starved + PATIENCE:
            raise _too_big(self.schedule, self.waiting.units[0], self.machine())

    def _start(self, name: str) -> None:
        unit, log = self.units[name], self.site.logs / f"{name.replace('/', '.')}.log"
        statistics = log.with_suffix(".ccache")
        statistics.unlink(missing_ok=True)
        env = {**self.site.env, "CCACHE_STATSLOG": str(statistics)}
        self.site.lock.parent.mkdir(parents=True, exist_ok=True)
        holding_lock = ("flock", "--shared", "--no-fork", str(self.site.lock), *unit.command)  # flock is in util-linux
        with interrupt.held():  # no signal may come between the start and the entry in `running`
            child = Child(holding_lock, log=log, env=env, cwd=unit.cwd)
            self.running[name] = _Started(unit, child, log, statistics, time.monotonic())
        with suppress(OSError):  # it may have ended already
            Path(f"/proc/{child.pid}/oom_score_adj").write_text(VICTIM, encoding="ascii")
        self.watch("started", unit, None)

    def _ended(self, started: _Started, usage: Usage) -> None:
        name = started.unit.name
        del self.running[name]
        output, cached = "", False
        with suppress(OSError):
            output = started.log.read_text(encoding="utf-8", errors="replace")[-4000:]
            cached = "_hit\n" in started.statistics.read_text(encoding="utf-8")
        result = UnitResult(usage, time.monotonic() - started.started_at, cached, name in self.retried)
        if usage.code == 0:
            self.report.units[name] = result
            self.watch("cached" if cached else "done", started.unit, result)
        elif was_killed(usage.code, output):
            self.watch("killed", started.unit, result)
            if name in self.retried:
                now, predicted = self.machine(), self.schedule.costs[name].peak
                reached = f"it reached {usage.peak / 1e9:.1f} GB of the {predicted / 1e9:.1f} GB predicted"
                why = f"out of memory: {reached}; now {now.available / 1e9:.1f} GB are available ({now.bound})"
                failure = f"{name} was killed twice, the second time while it ran alone"
                fix = "--jobs 1   # first give it memory: ./inv down stops a served model, swap helps too"
                raise CompileError(failure, why, fix, code="compile.killed")
            self.retried.add(name)  # the unit runs once more, alone; afterwards fewer units run at once
            self.again.append(name)
            self.waiting.jobs = max(1, self.waiting.jobs // 2)
        else:
            self.watch("failed", started.unit, result)
            tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:]) or "it printed nothing"
            failure, fix = f"{name} ended with code {usage.code}", on("less", started.log)
            self.failure = self.failure or ProcessError(failure, tail, fix, code="process.failed")


def parse_limit(text: str) -> int | None:
    """Return the maximum of jobs in `--jobs`; None for auto. Raises UsageError."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 6) or int(text) < 1:
        raise UsageError(f"--jobs {text!r} is not a number", "it takes auto or 1, 2, …", "without --jobs")
    return int(text)


def was_killed(code: int, output: str) -> bool:
    """Tell whether a program that ended with `code` and `output`, or its child, was killed or got no memory."""
    return code in KILL_CODES or (code != 0 and LAST_WORDS.search(output) is not None)


def _too_big(schedule: Schedule, name: str, machine: Machine) -> CompileError:
    cost = schedule.costs[name]
    available = f"{machine.available / 1e9:.1f} GB are available ({machine.bound}), of which {RESERVE / 1e9:.1f} GB"
    why = f"its predicted peak is {cost.peak / 1e9:.1f} GB ({cost.source}), and {available} stay free"
    fix = "again   # first free memory (./inv down stops a served model) or raise the container's limit"
    return CompileError(f"{name} does not fit into this machine's memory", why, fix, code="compile.memory")
