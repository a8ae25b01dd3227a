"""The resources left for this process: bytes of memory and CPUs, under every cgroup (version 1 or 2) that contains it.

On a Spark CPU and GPU share one memory. The memory of a served model is in no process's resident size and in no
cgroup's usage, but it is missing from MemAvailable. So MemAvailable is always read, and the cgroups can only lower the
result.
"""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """Available bytes, CPUs, and the source of the bytes' bound: "MemAvailable" or a cgroup's folder."""

    available: int
    cores: int
    bound: str = "MemAvailable"


@dataclass(frozen=True)
class _Flavour:
    """One version of the memory controller: files of limits and usage, and memory.stat's name of droppable memory."""

    file_system: str
    limits: tuple[str, ...]
    usage: str
    droppable: str


# Kernel documentation: admin-guide/cgroup-v2.rst (memory.high throttles, so it bounds too), cgroup-v1/memory.rst.
FLAVOURS = (
    _Flavour("cgroup2", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    _Flavour("cgroup", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)


def measure(root: Path = Path("/")) -> Machine:
    """Return the available bytes and CPUs; `root` is the folder with /proc and the cgroup mounts."""
    available, bound = numbers(root / "proc/meminfo").get("MemAvailable:", 0) * 1024, "MemAvailable"
    for flavour in FLAVOURS:
        for group in groups(root, flavour.file_system, "memory"):
            limits = [limit for name in flavour.limits if (limit := numbers(group / name).get("")) is not None]
            used = numbers(group / flavour.usage).get("")
            if limits and used is not None:  # file cache that the kernel can drop is not counted
                remaining = min(limits) - max(0, used - numbers(group / "memory.stat").get(flavour.droppable, 0))
                if remaining < available:
                    available, bound = remaining, str(group)
    return Machine(max(0, available), cpus(root), bound)


def largest_process(least: int = GIB) -> str:
    """Name the process with the most memory that we may see: "python3 (pid 12), 8.1 GiB"; empty below `least` bytes."""
    sizes = [
        (process.info["memory_info"].rss, process.info["name"], process.pid)
        for process in psutil.process_iter(["name", "memory_info"])
        if process.info["memory_info"] and process.pid != os.getpid()
    ]
    size, name, pid = max(sizes, default=(0, "", 0))
    return f"{name} (pid {pid}), {in_gib(size)}" if size > least else ""


def in_gib(count: float) -> str:
    """Format bytes as GiB, or as MiB below 1 GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def resident(pids: Iterable[int]) -> dict[str, int]:
    """Return the bytes of processes now: `rss`, and `pss`, in which a shared page counts once in total.

    Where the kernel hides another user's pages, as in a container, `pss` counts as `rss` does.
    """
    sizes = {"rss": 0, "pss": 0}
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            sizes["rss"] += (own := process.memory_info().rss)
            try:
                sizes["pss"] += process.memory_full_info().pss
            except psutil.AccessDenied:
                sizes["pss"] += own
    return sizes


def cpus(root: Path) -> int:
    """Return how many CPUs the affinity mask and every quota leave, at least 1."""
    count = len(os.sched_getaffinity(0))
    quotas = [_fields(group / "cpu.max") for group in groups(root, "cgroup2", "cpu")]
    quotas += [
        _fields(g / "cpu.cfs_quota_us") + _fields(g / "cpu.cfs_period_us") for g in groups(root, "cgroup", "cpu")
    ]
    for quota in quotas:
        if len(quota) == 2 and all(word.isdigit() for word in quota) and int(quota[1]):
            count = min(count, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, count)


def groups(root: Path, file_system: str, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of its parents, innermost first.

    In a container the path in /proc/self/cgroup may be the host's; the mount then has the container's group at its top.
    """
    for mount, top in _mounts(root, file_system, controller):
        for line in _lines(root / "proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if (controller if file_system == "cgroup" else "") in controllers.split(","):
                inside = PurePosixPath(path)
                is_visible = inside.is_relative_to(top) and ".." not in inside.parts
                group = mount / inside.relative_to(top) if is_visible else mount
                while group != mount:
                    yield group
                    group = group.parent
                yield mount


def _mounts(root: Path, file_system: str, controller: str) -> Iterator[tuple[Path, str]]:
    """Yield mount point and root inside the file system of each mount (proc_pid_mountinfo(5))."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind == file_system and (kind == "cgroup2" or controller in options.split(",")):
            top, point = fields.split(" ")[3:5]
            yield root / point.lstrip("/"), top


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _fields(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def numbers(file: Path) -> dict[str, int]:
    """Return word → number for each line of a kernel file ("" if no word precedes it); empty without the file."""
    values: dict[str, int] = {}
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            key, number = ["", *line.split()[:2]][-2:]
            if number.isdecimal():
                values[key] = int(number)
    return values
