"""Ends a server before the machine runs out of memory: a Spark that does freezes, and needs its power button.

`MemoryWatch.look` samples what the kernel says: MemAvailable, which on a GB10 falls with what CUDA takes, and every
memory cgroup with a limit (version 1 or 2), which does not count CUDA's part (docs/concepts/memory-guard.md).
`sparkforge/serve/supervise.py` looks, ends its server and says why. The bounds are data:
`sparkforge/plan/thresholds.toml`. For other programs than servers take earlyoom.

It imports the standard library only.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.memory import FLAVOURS, groups, in_gib
from sparkforge.plan.thresholds import Thresholds

UNLIMITED = 1 << 50  # bytes: cgroup version 1 writes 2^63 for no limit
RECENT_SECONDS = 30.0  # a server whose process the kernel killed ends within that time
MACHINE, LIMIT = "this machine", "the container's or cgroup's limit"
# File cache in memory.stat, which the kernel can drop, and the file that counts kills, in version 2 and 1.
DROPPABLE = {"cgroup2": ("inactive_file", "active_file"), "cgroup": ("total_inactive_file", "total_active_file")}
KILLS = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}


@dataclass(frozen=True)
class Trouble:
    """Why a server must end; `now`: there is no time for SIGTERM."""

    why: str
    now: bool


class MemoryWatch:
    """The memory limits of a server: the machine and, with `around`, the cgroups of this process.

    `root` is where /proc and the cgroup mounts are looked up. Raises OSError where there is no /proc/meminfo.
    """

    def __init__(self, limits: Thresholds, root: Path = Path("/"), *, around: bool = False) -> None:
        self.limits, self._root = limits, root
        (root / "proc/meminfo").read_bytes()
        # The innermost group first, whether it has a limit now or not.
        flavours = FLAVOURS if around else ()
        self._groups = [(group, kind) for kind in flavours for group in groups(root, kind.file_system, "memory")]
        self._low: Counter[Path] = Counter()  # how many looks in a row were below the first bound
        # The innermost cgroup counts this server's own processes; the machine's counter is everybody's.
        counters = [group / KILLS[kind.file_system] for group, kind in self._groups]
        self._counter = next((file for file in counters if "oom_kill" in _numbers(file)), root / "proc/vmstat")
        self._before = self._newer = self._kills()
        self._turned = time.monotonic()

    def look(self, now: float) -> Trouble | None:
        """Sample memory, and return the worst trouble. `now` is a monotonic time in seconds."""
        memory = _numbers(self._root / "proc/meminfo")
        total = memory.get("MemTotal:", 0)
        troubles = [self._judge(self._root, MACHINE, 1024 * memory.get("MemAvailable:", total), 1024 * total)]
        for group, kind in self._groups:
            limit = _numbers(group / kind.limits[0]).get("", UNLIMITED)
            if limit < UNLIMITED:
                stat = _numbers(group / "memory.stat")
                used = _numbers(group / kind.usage).get("", 0) - sum(
                    stat.get(k, 0) for k in DROPPABLE[kind.file_system]
                )
                troubles.append(self._judge(group, LIMIT, limit - max(0, used), limit))
        if now - self._turned >= RECENT_SECONDS and self._counter.name == "vmstat":
            self._before, self._newer, self._turned = self._newer, self._kills(), now
        return max(filter(None, troubles), key=lambda trouble: trouble.now, default=None)

    def _judge(self, place: Path, name: str, available: int, total: int) -> Trouble | None:
        end, remaining = self.limits.end_below(total), f"{name} has {in_gib(available)} of {in_gib(total)} left"
        if available < self.limits.kill_below(total):
            return Trouble(f"{remaining}, and it falls", now=True)
        self._low[place] = self._low[place] + 1 if available < end else 0
        return (
            Trouble(f"{remaining}, under {in_gib(end)}", now=False) if self._low[place] >= self.limits.looks else None
        )

    def _kills(self) -> int:
        return _numbers(self._counter).get("oom_kill", 0)

    def killed(self) -> str:
        """Say where the kernel itself killed a process for memory; empty if it did not.

        In the server's cgroup since the watch began; where none counts, on the machine within the last seconds.
        """
        if not (kills := self._kills() - self._before):
            return ""
        limited = any(_numbers(group / kind.limits[0]).get("", UNLIMITED) < UNLIMITED for group, kind in self._groups)
        return f"the kernel killed {kills} of its processes for memory: {LIMIT if limited else MACHINE} was used up"


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers in a file of the kernel by the words before them, one without by ""; none without the file."""
    numbers: dict[str, int] = {}
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            key, number = ["", *line.split()[:2]][-2:]
            if number.isdecimal():
                numbers[key] = int(number)
    return numbers
