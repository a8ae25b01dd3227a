"""Ends a server before the machine runs out of memory: a Spark that does freezes, and needs its power button.

`MemoryWatch.look` samples what the kernel says: MemAvailable, which on a GB10 falls with what CUDA takes, and every
memory cgroup with a limit (version 1 or 2), which does not count CUDA's part (docs/concepts/memory-guard.md).
`sparkforge/serve/supervise.py` looks, ends its server and says why. The bounds are data:
`sparkforge/plan/thresholds.toml`. For other programs than servers take earlyoom.

It imports the standard library only, opens its files once, and needs no new page to look.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.memory import FLAVOURS, groups, in_gib
from sparkforge.plan.thresholds import Thresholds

BUFFER = 1 << 14  # bytes; memory.stat has 2 to 5 kB
UNLIMITED = 1 << 50  # bytes: cgroup version 1 writes 2^63 for no limit
CURRENT, FUTURE = 1, 2  # mlockall(2)
RECENT_SECONDS = 30.0  # a server whose process the kernel killed ends within that time
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


class Area:
    """What has a bound of its own, a machine or a cgroup: bytes available and in all.

    `kills` counts what the kernel killed there for memory; `counts` tells whether it says so.
    """

    counts = False

    def __init__(self, name: str, limits: Thresholds) -> None:
        self.name, self._limits = name, limits
        self.available = self.total = self.kills = self._low = 0

    def look(self) -> Trouble | None:
        """Sample, and return what is wrong. Raises OSError."""
        self._sample()
        limits, available, total = self._limits, self.available, self.total
        if total <= 0:
            return None
        if available < limits.kill_below(total):
            return Trouble(self._describe("and it falls"), now=True)
        self._low = self._low + 1 if available < limits.end_below(total) else 0
        if self._low >= limits.looks:
            return Trouble(self._describe(f"under {in_gib(limits.end_below(total))}"), now=False)
        return None

    def _describe(self, cause: str) -> str:
        return f"{self.name} has {in_gib(self.available)} of {in_gib(self.total)} left, {cause}"

    def _sample(self) -> None:
        raise NotImplementedError


class _MachineMemory(Area):
    """The whole machine: MemAvailable of MemTotal."""

    def __init__(self, root: Path, limits: Thresholds) -> None:
        super().__init__("this machine", limits)
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
        super().__init__("the container's or cgroup's limit", limits)
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
                trouble = area.look()
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


def lock_memory() -> None:
    """Keep this process's pages in memory, where it may, so that it can act when the machine swaps."""
    ctypes.CDLL(None).mlockall(CURRENT | FUTURE)


def _opened(path: Path) -> _File | None:
    """Return a file that not every kernel has; None where it is not there or cannot be read."""
    try:
        file = _File(path)
        file.read()
    except OSError:
        return None
    return file
