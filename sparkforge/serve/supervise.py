"""`python -P supervise.py -- COMMAND`: runs a server, and ends with an exit code that a restart policy can use.

vLLM's API server ends with code 0 when its engine process has died, and a killed API server leaves the engine and
its workers behind. This process is the server's parent and the reaper of all that descends from it: it passes signals
on, ends what the server leaves, and writes down how the server ended. If it is killed itself, the server gets SIGTERM.
Before no memory is left (`MemoryWatch`), it ends the server and says why.

It runs as a file, with the server's interpreter or another one, so it imports only the standard library, psutil, and
modules of ours that need no more.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # for this process: the server has a path of its own

from sparkforge.core import memory, paths
from sparkforge.core.files import write_json
from sparkforge.core.memory import FLAVOURS, groups, in_gib, numbers
from sparkforge.plan import thresholds
from sparkforge.plan.thresholds import Thresholds

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
MCL_CURRENT, MCL_FUTURE = 1, 2  # mlockall(2)
STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
WATCHED_SIGNALS = {*STOPS, signal.SIGCHLD}
FIRST_VICTIM = "500"  # oom_score_adj: the kernel kills the server before us and before a login
# The code for an unrequested end with code 0: sparkforge.core.errors.ServerError's code, which is "the server ended".
ENDED = 24
NOT_STARTED = 127  # as shells have it
SIGNALLED = 128  # plus the signal's number
GRACE_SECONDS = 5.0  # for processes that the server left
LONG_SECONDS = 3600.0  # between two samples without a guard
CACHE_SECONDS = 5.0  # between two looks at the page cache
LONGEST_SECONDS = 3600.0  # a start takes no longer (container.READY_SECONDS)
TURN_SECONDS = 0.1  # between two samples while the server ends
UNLIMITED = 1 << 50  # bytes: cgroup version 1 writes 2^63 for no limit
RECENT_SECONDS = 30.0  # a server whose process the kernel killed ends within that time
MACHINE, LIMIT = "this machine", "the container's or cgroup's limit"
# File cache in memory.stat, which the kernel can drop, and the file that counts kills, in version 2 and 1.
DROPPABLE = {"cgroup2": ("inactive_file", "active_file"), "cgroup": ("total_inactive_file", "total_active_file")}
KILLS = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}
# Read by doctor: sparkforge/doctor/signatures.toml, memory-guard.
MESSAGE = """✗ the memory guard ended the server [server.memory]
  why:  {why}{other}
  next: {fix}"""
FIX = (
    "./inv plan --help   # less context (MAX_MODEL_LEN), a smaller --gpu-memory-utilization, or stop "
    "what else holds memory"
)


class Outcome(NamedTuple):
    """The end of a server: this process's exit code, whether a signal asked for it, and why if it was for memory."""

    code: int
    asked: bool
    why: str = ""


class Trouble(NamedTuple):
    """Why a server must end; `now`: there is no time for SIGTERM."""

    why: str
    now: bool


class MemoryWatch:
    """The memory limits of a server: the machine and, with `around`, the cgroups of this process.

    It samples MemAvailable, which falls with CUDA's allocations on a GB10, and every memory cgroup with a limit, which
    does not count those (docs/concepts/memory-guard.md). `root` has /proc and the cgroup mounts. Raises
    OSError where there is no /proc/meminfo.
    """

    def __init__(self, limits: Thresholds, root: Path = Path("/"), *, around: bool = False) -> None:
        self.limits, self._root = limits, root
        (root / "proc/meminfo").read_bytes()
        # The innermost group first, whether it has a limit now or not.
        flavours = FLAVOURS if around else ()
        self._groups = [(group, kind) for kind in flavours for group in groups(root, kind.file_system, "memory")]
        self._low: Counter[Path] = Counter()  # how many samples in a row were below the first bound
        # The innermost cgroup counts this server's own processes; the machine's counter is everybody's.
        counters = [group / KILLS[kind.file_system] for group, kind in self._groups]
        self._counter = next((file for file in counters if "oom_kill" in numbers(file)), root / "proc/vmstat")
        self._before = self._newer = self._kills()
        self._turned = time.monotonic()

    def look(self, now: float) -> Trouble | None:
        """Sample memory, and return the worst trouble. `now` is a monotonic time in seconds."""
        memory = numbers(self._root / "proc/meminfo")
        total = memory.get("MemTotal:", 0)
        troubles = [self._judge(self._root, MACHINE, 1024 * memory.get("MemAvailable:", total), 1024 * total)]
        for group, kind in self._groups:
            limit = numbers(group / kind.limits[0]).get("", UNLIMITED)
            if limit < UNLIMITED:
                stat = numbers(group / "memory.stat")
                used = numbers(group / kind.usage).get("", 0) - sum(stat.get(k, 0) for k in DROPPABLE[kind.file_system])
                troubles.append(self._judge(group, LIMIT, limit - max(0, used), limit))
        if now - self._turned >= RECENT_SECONDS and self._counter.name == "vmstat":
            self._before, self._newer, self._turned = self._newer, self._kills(), now
        return max(filter(None, troubles), key=lambda trouble: trouble.now, default=None)

    def _judge(self, place: Path, name: str, available: int, total: int) -> Trouble | None:
        end, remaining = self.limits.end_below(total), f"{name} has {in_gib(available)} of {in_gib(total)} left"
        if available < self.limits.kill_below(total):
            return Trouble(f"{remaining}, and it falls", now=True)
        self._low[place] = self._low[place] + 1 if available < end else 0
        if self._low[place] < self.limits.looks:
            return None
        return Trouble(f"{remaining}, under {in_gib(end)}", now=False)

    def _kills(self) -> int:
        return numbers(self._counter).get("oom_kill", 0)

    def killed(self) -> str:
        """Return where the kernel killed a process for memory, by the cgroup's or the machine's counter; or nothing."""
        if not (kills := self._kills() - self._before):
            return ""
        limited = any(numbers(group / kind.limits[0]).get("", UNLIMITED) < UNLIMITED for group, kind in self._groups)
        return f"the kernel killed {kills} of its processes for memory: {LIMIT if limited else MACHINE} was used up"


def supervised(
    command: Sequence[str], end: Path | None = None, weights: str = "", *, trial: bool = False
) -> tuple[str, ...]:
    """Return the command that runs `command` under this program, which records the end in the file `end`.

    The files in `weights` are dropped from the page cache. A `trial` ends with the process that starts it.
    """
    options = (*(("--end", str(end)) if end else ()), *(("--weights", weights) if weights else ()))
    options += ("--parent", str(os.getpid())) if trial else ()
    return (sys.executable, "-P", __file__, *options, "--", *command)


def run(command: Sequence[str], watch: MemoryWatch | None = None, weights: str = "") -> Outcome:
    """Run `command` to its end: 0 or 128 plus the signal after a requested end; any other end is never 0."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
    parent = os.getpid()
    server = os.fork()
    if not server:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        _become(command, parent, former)
    if weights and not os.fork():
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        tend(weights, former)
    if watch:
        libc.mlockall(MCL_CURRENT | MCL_FUTURE)  # where it may: it must act when the machine swaps
    keeper = _Keeper(server, watch)
    stop_signal: int | None = None
    code: int | None = None
    while code is None:
        info = signal.sigtimedwait(WATCHED_SIGNALS, keeper.period)
        number = info.si_signo if info else 0
        if number == signal.SIGCHLD:
            code = _reap(server)
        elif number in STOPS:
            stop_signal = stop_signal or number
            _send(server, number)
        if code is None:
            keeper.look(time.monotonic())
    _end_the_rest()
    if keeper.trouble:
        return Outcome(ENDED, asked=False, why=keeper.trouble.why)
    if stop_signal:
        return Outcome(SIGNALLED + stop_signal if code else 0, asked=True)
    why = watch.killed() if watch and code else ""
    return Outcome((code if code > 0 else SIGNALLED - code) if code else ENDED, asked=False, why=why)


class _Keeper:
    """Ends the server for memory: SIGTERM, then SIGKILL of its process group after a moment, or at once."""

    def __init__(self, server: int, watch: MemoryWatch | None) -> None:
        self._server, self._watch = server, watch
        self.trouble: Trouble | None = None
        self._since = 0.0
        self.period = watch.limits.period_seconds if watch else LONG_SECONDS
        self._grace = watch.limits.grace_seconds if watch else GRACE_SECONDS

    def look(self, now: float) -> None:
        """Sample memory, and end the server if necessary."""
        trouble = self._watch.look(now) if self._watch else None
        if trouble and not self.trouble:
            self.trouble, self._since, self.period = trouble, now, min(self.period, TURN_SECONDS)
            print(f"memory guard: {trouble.why}; the server is ended", flush=True)
            _send(self._server, signal.SIGURG)  # ignored by all but serve/cluster/watch.py, which tells the other nodes
            _send(self._server, signal.SIGTERM)
        if self.trouble and ((trouble and trouble.now) or now - self._since > self._grace):
            with suppress(ProcessLookupError, PermissionError):  # what left the group is ended afterwards
                os.killpg(self._server, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="supervise", description=__doc__)
    parser.add_argument("--end", type=Path, help="JSON file to write when the server has ended")
    parser.add_argument("--weights", default="", help="folder whose files leave the page cache once they were read")
    parser.add_argument("--parent", type=int, default=0, help="end when this process, our parent, has ended")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if options.parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != options.parent:  # the parent died before prctl, so no signal comes
            return SIGNALLED + signal.SIGTERM
    watch = None
    try:
        if limits := thresholds.configured(os.environ):
            watch = MemoryWatch(limits, around=True)
    except (OSError, ValueError) as error:
        print(f"WARNING: no memory guard: {error}", flush=True)
    outcome = run(options.command, watch, options.weights)
    if outcome.why:
        largest = memory.largest_process()
        other = f"; now the largest is {largest}" if largest else ""
        print(MESSAGE.format(why=outcome.why, other=other, fix=paths.where_it_runs(FIX)), flush=True)
    elif not outcome.asked:
        print(f"the server ended by itself; exit code {outcome.code}", flush=True)
    if options.end:
        with suppress(OSError):
            write_json(options.end, {"pid": os.getpid(), "time": time.time(), **outcome._asdict()})
    return outcome.code


def _become(command: Sequence[str], parent: int, mask: set[int | signal.Signals]) -> None:
    """Replace the forked child by the server. Never returns."""
    try:
        if os.getppid() != parent:  # the parent died before prctl, so no signal comes
            os._exit(SIGNALLED + signal.SIGTERM)
        os.setpgid(0, 0)  # so that one call kills all of it
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM, encoding="ascii")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(command[0], list(command))  # noqa: S606 - the child becomes the server
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", flush=True)
    finally:
        os._exit(NOT_STARTED)


def _reap(server: int) -> int | None:
    """Reap every child that has ended; return the server's code, -N for signal N."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _send(server: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(server, number)


def _end_the_rest() -> None:
    """End every process that the server left: they are our children now, however they were started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        descendants = psutil.Process().children(recursive=True)
        for process in descendants:
            with suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(descendants, timeout=GRACE_SECONDS)


def tend(folder: str, mask: Iterable[int]) -> NoReturn:
    """Drop a folder's weights from the page cache while a start can read them; then end this process.

    `mask` are the signals to block. vLLM reads a checkpoint once. The pages that stay in the page cache, which on a
    Spark is the GPU's memory too, can be dropped by the kernel. But cudaMemGetInfo counts them as used, and a start has
    to reclaim them in the middle of its largest allocations. posix_fadvise(DONTNEED) needs only read permission. It
    drops only unmapped pages: a shard that is being read loses its read-ahead at most.
    """
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < end:
            for weights in Path(folder).glob("*.safetensors"):
                with suppress(OSError), weights.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(CACHE_SECONDS)
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
