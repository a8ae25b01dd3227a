"""Ends a server before the machine runs out of memory: a Spark that does freezes, and needs its power button.

`MemoryWatch.look` samples what the kernel says: MemAvailable, which on a GB10 falls with what CUDA takes; every memory
cgroup with a limit (version 1 or 2), which does not count CUDA's part (docs/concepts/memory-guard.md); and the time
that every task waits for memory (PSI), where the kernel has it. `sparkforge/serve/supervise.py` looks, ends its server
and says why. The bounds are data: `sparkforge/plan/thresholds.toml`.

`python -m sparkforge.serve.guard` watches a whole machine, for the unit of `./inv service.guard --install`, and has
every supervisor end its server. It imports the standard library only, opens its files once, and needs no new page to
look.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import notify
from sparkforge.core.memory import FLAVOURS, groups, in_gib
from sparkforge.plan import thresholds
from sparkforge.plan.thresholds import Thresholds

TELL = signal.SIGUSR1  # to a supervisor: end the server, this machine has too little memory
PROGRAM = b"/sparkforge/serve/supervise.py"  # the end of a supervisor's third word: `supervised` there
BUFFER = 1 << 14  # bytes; memory.stat has 2 to 5 kB
UNLIMITED = 1 << 50  # bytes: cgroup version 1 writes 2^63 for no limit
CURRENT, FUTURE = 1, 2  # mlockall(2)
RECENT_SECONDS = 30.0  # a server whose process the kernel killed ends within that time
SEARCH_SECONDS = 1.0  # between two searches for supervisors while memory is short
FULL, TOTAL = b"full ", b"total="  # Documentation/accounting/psi.rst
# What the kernel can drop: memory.stat of version 2 and 1.
DROPPABLE = {
    "cgroup2": (b"\ninactive_file ", b"\nactive_file "),
    "cgroup": (b"\ntotal_inactive_file ", b"\ntotal_active_file "),
}
SPACES = b" \t"
KILLS = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}


@dataclass(frozen=True)
class Trouble:
    """Why a server must end; `now`: there is no time for SIGTERM."""

    why: str
    now: bool


class _File:
    """A file of /proc or of a cgroup, opened once and read into the same buffer again and again."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._buffer = bytearray(BUFFER)
        self._buffers = [self._buffer]
        self._size = 0

    def read(self) -> None:
        """Read it. Raises OSError, such as for a cgroup that is gone."""
        self._size = os.preadv(self._descriptor, self._buffers, 0)

    def number(self, key: bytes = b"", start: int = 0) -> int | None:
        """Return the number behind `key`, or at the file's begin; None for `max`, or if there is none."""
        position = self._buffer.find(key, start, self._size) if key else 0
        if position < 0:
            return None
        position += len(key)
        while position < self._size and self._buffer[position] in SPACES:
            position += 1
        value, digits = 0, 0
        while position < self._size and 48 <= self._buffer[position] <= 57:
            value, digits, position = 10 * value + self._buffer[position] - 48, digits + 1, position + 1
        return value if digits else None

    def stalled(self) -> int:
        """Return the microseconds in which every task waited, of a file of pressure."""
        return self.number(TOTAL, max(0, self._buffer.find(FULL, 0, self._size))) or 0


class Area:
    """What has a bound of its own, a machine or a cgroup: bytes available and in all, and the share of waiting.

    `kills` counts what the kernel killed there for memory; `counts` tells whether it says so.
    """

    counts = False

    def __init__(self, name: str, pressure: Path, limits: Thresholds) -> None:
        self.name, self._limits = name, limits
        self.available = self.total = self.kills = self._low = self._at = 0
        self.stall = 0.0
        self._pressure = _opened(pressure)
        size = max(1, round(limits.stall_seconds / limits.period_seconds))
        self._times, self._stalls = [0.0] * size, [0] * size

    def look(self, now: float) -> Trouble | None:
        """Sample, and return what is wrong. `now` is a monotonic time in seconds. Raises OSError."""
        self._sample()
        self._sample_stall(now)
        limits, available, total = self._limits, self.available, self.total
        if total <= 0:
            return None
        if available < limits.kill_below(total):
            return Trouble(self._describe("and it falls"), now=True)
        self._low = self._low + 1 if available < limits.end_below(total) else 0
        if self._low >= limits.looks:
            return Trouble(self._describe(f"under {in_gib(limits.end_below(total))}"), now=False)
        if self.stall >= limits.stall_share and available < limits.stall_below * total:
            waited = f"for {self.stall:.0%} of {limits.stall_seconds:g} s every task waited for memory"
            return Trouble(self._describe(waited), now=False)
        return None

    def _describe(self, cause: str) -> str:
        return f"{self.name} has {left(self)} left, {cause}"

    def _sample(self) -> None:
        raise NotImplementedError

    def _sample_stall(self, now: float) -> None:
        """Take the share of waiting over the window; the first window, which is not full, counts as none."""
        if self._pressure is None:
            return
        self._pressure.read()
        stalled, slot = self._pressure.stalled(), self._at % len(self._times)
        oldest, before = self._times[slot], self._stalls[slot]
        self._times[slot], self._stalls[slot], self._at = now, stalled, self._at + 1
        self.stall = (stalled - before) / 1e6 / (now - oldest) if oldest and now > oldest else 0.0


class _MachineMemory(Area):
    """The whole machine: MemAvailable of MemTotal."""

    def __init__(self, root: Path, limits: Thresholds) -> None:
        super().__init__("this machine", root / "proc/pressure/memory", limits)
        self._memory, self._counters = _File(root / "proc/meminfo"), _opened(root / "proc/vmstat")
        self.counts = self._counters is not None

    def _sample(self) -> None:
        self._memory.read()
        self.total = (self._memory.number(b"MemTotal:") or 0) * 1024
        available = self._memory.number(b"MemAvailable:")
        self.available = self.total if available is None else available * 1024
        if self._counters:
            self._counters.read()
            self.kills = self._counters.number(b"\noom_kill ") or 0


class _Group(Area):
    """A memory cgroup: what is below its limit, file cache that the kernel can drop not counted."""

    def __init__(self, folder: Path, kind: str, files: tuple[str, str], limits: Thresholds) -> None:
        super().__init__("the container's or cgroup's limit", folder / "memory.pressure", limits)
        limit, usage = files
        self._limit, self._usage = _File(folder / limit), _File(folder / usage)
        self._stat, self._kills, self._droppable = (
            _File(folder / "memory.stat"),
            _opened(folder / KILLS[kind]),
            DROPPABLE[kind],
        )
        self.counts = self._kills is not None

    def _sample(self) -> None:
        if self._kills:
            self._kills.read()
            self.kills = self._kills.number(b"oom_kill ") or 0
        self._limit.read()
        limit = self._limit.number()
        if limit is None or limit > UNLIMITED:
            self.total = 0
            return
        self._usage.read()
        self._stat.read()
        used = self._usage.number() or 0
        for key in self._droppable:
            used -= self._stat.number(key) or 0
        self.total, self.available = limit, limit - max(0, used)


class MemoryWatch:
    """What bounds a server's memory here: the machine and, with `around`, the cgroups of this process.

    `root` is where /proc and the cgroup mounts are looked up. Raises OSError where there is no /proc/meminfo.
    """

    def __init__(self, limits: Thresholds, root: Path = Path("/"), *, around: bool = False) -> None:
        self.limits = limits
        self.areas: list[Area] = [_MachineMemory(root, limits)]
        for flavour in FLAVOURS if around else ():  # innermost group first, whether it has a limit now or not
            for folder in groups(root, flavour.file_system, "memory"):
                with suppress(OSError):
                    usage = (flavour.limits[0], flavour.usage)
                    self.areas.append(_Group(folder, flavour.file_system, usage, limits))
        self._turned = time.monotonic()
        self.look(self._turned)
        # The innermost cgroup counts this server's own processes; the machine's counter is everybody's.
        self._counter = next((area for area in self.areas[1:] if area.counts), self.areas[0])
        self._before = self._newer = self._counter.kills

    def look(self, now: float) -> Trouble | None:
        """Sample every area, and return the worst trouble. `now` is a monotonic time in seconds."""
        worst = None
        for area in self.areas:
            try:
                trouble = area.look(now)
            except OSError:  # it has gone, or its kernel does not say now
                continue
            if trouble and (worst is None or trouble.now > worst.now):
                worst = trouble
        if now - self._turned >= RECENT_SECONDS and self._counter is self.areas[0]:
            self._before, self._newer, self._turned = self._newer, self._counter.kills, now
        return worst

    def killed(self) -> str:
        """Say where the kernel itself killed a process for memory; empty if it did not.

        In the server's cgroup since the watch began; where none counts, on the machine within the last seconds.
        """
        self.look(time.monotonic())
        if not (kills := self._counter.kills - self._before):
            return ""
        limited = next((area for area in self.areas[1:] if area.total), self.areas[0])
        return f"the kernel killed {kills} of its processes for memory: {limited.name} was used up"


def lock_memory() -> int:
    """Keep this process's pages in memory, so that it can act when the machine swaps; return how many bytes are kept.

    Without the right to lock them all, those that run code and hold the heap come first.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if libc.mlockall(CURRENT | FUTURE) == 0:
        return _locked()
    with suppress(OSError):
        for line in sorted(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines(), key=_rank):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if _rank(line) < 3:
                libc.mlock(ctypes.c_void_p(first), ctypes.c_size_t(last - first))
    return _locked()


def main(arguments: Sequence[str], root: Path = Path("/")) -> int:
    """Watch this machine for ever; returns 1 with `--once` if there is too little memory now.

    `root` is where the files with the memory's figures are looked up; processes are those of /proc.
    """
    parser = argparse.ArgumentParser(prog="python -m sparkforge.serve.guard", description=__doc__)
    parser.add_argument("--once", action="store_true", help="look once, print the figures, and end")
    options = parser.parse_args(arguments)
    try:
        limits = thresholds.configured(os.environ)
    except ValueError as error:
        print(f"✗ {error}", file=sys.stderr)
        return 2
    limits = limits or thresholds.load()
    watch = MemoryWatch(limits, root)
    if options.once:
        trouble = watch.look(time.monotonic())
        print(trouble.why if trouble else _bounds(watch))
        return 1 if trouble else 0
    print(f"memory guard: {in_gib(lock_memory())} of this process are locked", flush=True)
    notify.tell(ready=True, status=_bounds(watch, "watches; "))
    ending: _Ending | None = None
    while True:
        now = time.monotonic()
        if trouble := watch.look(now):
            ending = ending or _Ending(2 * limits.grace_seconds)
            ending.look(trouble, now)
        else:
            ending = None
        time.sleep(limits.period_seconds)


class _Ending:
    """Ends the servers while the machine has too little memory: tells each supervisor, and kills what does not end.

    `patience` is how many seconds a supervisor has after it was told, and again after a kill.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._now, self._searched = False, -SEARCH_SECONDS
        self._since: dict[int, float] = {}  # supervisor → when it was told, or its server was killed
        self._killed: set[int] = set()  # those whose servers were killed at once

    def look(self, trouble: Trouble, now: float) -> None:
        """Search for supervisors, and act on those whose turn it is. `now` is a monotonic time in seconds."""
        if trouble.now == self._now and now - self._searched < SEARCH_SECONDS:
            return
        self._now, self._searched = trouble.now, now
        running = _supervisors()
        self._since = {pid: self._since[pid] for pid in running if pid in self._since}  # ids are used again
        self._killed.intersection_update(running)
        new = [pid for pid in running if pid not in self._since]
        late = [pid for pid, since in self._since.items() if now - since > self._patience]
        at_once = [pid for pid in running if trouble.now and pid not in {*late, *self._killed}]
        _signal(new, TELL)  # before the kill: it takes SIGUSR1 before SIGCHLD, and so says why
        _kill_servers(at_once)
        _kill_servers(late, or_supervisors=True)
        self._since.update(dict.fromkeys((*new, *at_once, *late), now))
        self._killed.update(at_once)
        if new:
            _tell(f"{trouble.why}; servers that are ended: {len(new)}")
        if at_once:
            _tell(f"{trouble.why}; servers that are killed at once: {len(at_once)}")
        if late:
            _tell(f"{trouble.why}; servers that did not end and are killed: {len(late)}")


def _bounds(watch: MemoryWatch, start: str = "") -> str:
    """Say what is available on the machine now, and when servers end."""
    machine = watch.areas[0]
    bound = watch.limits.end_below(machine.total)
    return f"{start}{left(machine)} available; servers end under {in_gib(bound)}"


def left(area: Area) -> str:
    """Return what an area has available, and of how much."""
    return f"{in_gib(area.available)} of {in_gib(area.total)}"


def _tell(line: str) -> None:
    """Write what was done into the log, and with the time into the unit's status."""
    print(f"memory guard: {line}", flush=True)
    notify.tell(status=f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {line}")


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        if _is_supervisor(pid):  # ids are used again
            with suppress(OSError):
                os.kill(pid, number)


def _kill_servers(supervisors: Sequence[int], *, or_supervisors: bool = False) -> None:
    """Kill all that each supervisor has started, which leaves it to say why.

    With `or_supervisors` one that has no server is killed itself; without, it may be about to say why. A killed
    supervisor ends its API server only: the engine would keep the memory.
    """
    parents = dict(_parents()) if supervisors else {}
    for supervisor in supervisors:
        family = [supervisor]
        for pid in family:
            family += [child for child, parent in parents.items() if parent == pid]
        if _is_supervisor(supervisor):  # ids are used again
            for pid in family[1:] or (family if or_supervisors else []):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the ids of every process that lives and of its parent."""
    for folder in _processes():
        with suppress(OSError):
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                yield int(folder.name), int(parent)


def _supervisors() -> list[int]:
    """Return the ids of supervisors. The child that one forks for the page cache has its command line, and is none."""
    alike = {int(folder.name) for folder in _processes() if _is_supervisor(int(folder.name))}
    parents = dict(_parents()) if alike else {}
    return sorted(pid for pid in alike if parents.get(pid) not in alike)


def _is_supervisor(pid: int) -> bool:
    with suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return len(arguments) > 2 and arguments[1] == b"-P" and arguments[2].endswith(PROGRAM)  # no editor of that file
    return False


def _processes() -> Iterator[Path]:
    return (folder for folder in Path("/proc").iterdir() if folder.name.isdecimal())


def _opened(path: Path) -> _File | None:
    """Return a file that not every kernel has; None where it is not there or cannot be read."""
    try:
        file = _File(path)
        file.read()
    except OSError:  # PSI that is switched off opens and does not read
        return None
    return file


def _rank(line: str) -> int:
    """Sort mappings by how soon a look needs them: heap and stack, the interpreter's code, what else it can write."""
    if line.endswith(("[heap]", "[stack]")):
        return 0
    return 1 if " r-xp " in line else 2 if " rw-p " in line else 3


def _locked() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
