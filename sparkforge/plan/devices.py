"""Devices to plan for: the rows of `devices.toml`, and this machine."""

import ctypes
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import psutil
from pydantic import Field

from sparkforge.core import memory
from sparkforge.core.errors import UsageError
from sparkforge.core.tables import BOUND, MEASURED, Figure, Record, load

FILE = Path(__file__).with_name("devices.toml")
THIS = "this"
GIB = 1 << 30
COPY_BYTES = 32 << 20  # a thread's buffer; two buffers are larger than the thread's share of the cache
COPY_THREADS = 20  # at most, as a Spark has 20 cores; their buffers take 1.3 GB
COPY_ROUNDS = 4
CPU_HOST = 4.0  # GiB besides weights and KV cache: vLLM's CPU build took 3.7 GB with the tiny model, x86-64, eager
CPU_PROFILES = ("embedded",)


class Point(Record):
    """A point of a curve: the `value` for the argument `at`."""

    at: float
    value: float


class Curve(Record):
    """Figures measured at some points: linear between them, and constant before the first and after the last."""

    points: tuple[Point, ...] = Field(min_length=1)
    source: str = Field(min_length=1)
    date: str

    def at(self, place: float) -> float:
        """Return the value for the argument `place`."""
        for low, high in itertools.pairwise(self.points):
            if low.at < place <= high.at:
                return low.value + (place - low.at) / (high.at - low.at) * (high.value - low.value)
        return self.points[0].value if place <= self.points[0].at else self.points[-1].value


class Interconnect(Record):
    """The network between devices: NCCL's bus bandwidth in GB/s (10⁹), and an all-reduce's µs by its bytes."""

    bandwidth: Figure
    latency: Curve


class Kernels(Record):
    """The assumptions about our kernels in a forecast (forecast.py).

    `read` is the memory bandwidth in GB/s. Experts reach the share `experts` of it (by tokens per expert), dense matrix
    products the share `dense`. For 64 x 64 weights, a warp scheduler issues `instructions` (by tokens per expert) and
    has `slots` in the time that memory takes to deliver these weights. `gap` is the time before each layer's experts
    in µs. `rest` is a layer's time between kernels and in kernels that read no weights, in µs by tokens.
    """

    read: Figure
    experts: Curve
    instructions: Curve
    slots: Figure
    gap: Figure
    dense: Figure
    rest: Curve


class Device(Record):
    """A device that serves. Memory in GiB, bandwidth in GB/s, rates in TFLOP/s without sparsity; None: not known.

    `resident` is the memory in use before a server starts. `runtime` is the part of vLLM's share that is not weights,
    KV cache or activations. `host` is the memory that vLLM takes outside its share of a unified memory. `most` is the
    highest share for vLLM. The experts' sizes are padded to multiples of `align`.
    """

    about: str
    names: tuple[str, ...]
    unified: bool
    experts: str
    align: int = Field(ge=1)
    profiles: tuple[str, ...]
    why_experts: str
    why_align: str
    memory: Figure
    resident: Figure
    runtime: Figure
    host: Figure
    most: Figure
    bandwidth: Figure | None = None
    rates: dict[str, Figure] = Field(default={})
    link: Interconnect | None = None
    kernels: Kernels | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that a server can see."""
        return int(self.memory.value * GIB)

    @property
    def bytes_a_second(self) -> float | None:
        """Memory bandwidth in bytes a second."""
        return self.bandwidth.value * 1e9 if self.bandwidth else None

    def flops(self, rate: str) -> float | None:
        """FLOP a second in the format `rate`, a key of `rates`; None if not known."""
        return self.rates[rate].value * 1e12 if rate in self.rates else None


class Devices(Record):
    """The whole file."""

    devices: dict[str, Device]


def table(path: Path = FILE) -> dict[str, Device]:
    """Return every device by name. Raises InputError."""
    return load(path, Devices).devices


def named(name: str) -> Device:
    """Return the table's device called `name`. Raises UsageError for an unknown name."""
    known = table()
    if name not in known:
        names = ", ".join((*known, THIS))
        raise UsageError(f"no device {name!r}", f"choose from {names}", "./inv plan --device spark")
    return known[name]


def by_gpu(name: str) -> Device | None:
    """Return the device of the GPU that nvidia-smi calls `name`; None if the table has no row for it."""
    spaced = name.replace("-", " ")
    return next((d for d in table().values() if any(known in spaced for known in d.names)), None)


def this_machine(gpu: str) -> Device:
    """Return this machine with measured figures. `gpu` is nvidia-smi's name of its GPU, empty if it has none.

    Raises UsageError for a GPU that the table does not have.
    """
    total, free = psutil.virtual_memory().total, memory.measure().available
    return describe(gpu, total, free, None if gpu else copy_speed())


def describe(gpu: str, total: int, free: int, bandwidth: float | None) -> Device:
    """Return a machine with `total` and `free` bytes of memory: the table's row for its GPU, or the processor alone.

    `free` is the memory that a server can get, within the container's limit. `bandwidth` is the processor's memory
    bandwidth in bytes a second, None if it is not known. Raises UsageError for a GPU that the table does not have.
    """
    size = _measured(total / GIB, "/proc/meminfo MemTotal")
    resident = _measured((total - free) / GIB, "MemTotal - MemAvailable, within the container's limit")
    if gpu:
        row = by_gpu(gpu)
        if row is None:
            fix = f"--device spark   # or add it to sparkforge/plan/{FILE.name}, with a source for each figure"
            raise UsageError(f"the GPU {gpu} is not known", f"sparkforge/plan/{FILE.name} has no row for it", fix)
        figures = {"memory": size, "resident": resident} if row.unified else {}
        return row.model_copy(update={"about": f"this machine: {gpu}", **figures})
    return Device(
        about="this machine: its processor",
        names=(),
        unified=True,
        experts="bf16",
        align=1,
        profiles=CPU_PROFILES,
        why_experts="vLLM's CPU build computes in bf16",
        why_align="our plugin takes the sizes as they are",
        memory=size,
        resident=resident,
        runtime=_bound(0.0, "no CUDA context and no graphs without a GPU"),
        host=_bound(CPU_HOST, "vLLM's CPU build took 3.7 GB with the tiny model"),
        most=_bound(1.0, "vLLM's share does not apply to a processor"),
        bandwidth=_measured(bandwidth / 1e9, "buffers copied on all cores in this run") if bandwidth else None,
    )


def copy_speed() -> float:
    """Measure the bytes a second that memory reads and writes, with a thread per core, at most COPY_THREADS."""
    cores = min(COPY_THREADS, len(os.sched_getaffinity(0)))
    pairs = [(ctypes.create_string_buffer(COPY_BYTES), ctypes.create_string_buffer(COPY_BYTES)) for _ in range(cores)]

    def copy(pair: tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]) -> None:
        for _ in range(COPY_ROUNDS):
            ctypes.memmove(pair[0], pair[1], COPY_BYTES)  # releases the GIL

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(copy, pairs))  # the first touch of every page is not counted
        start = time.monotonic()
        list(pool.map(copy, pairs))
        seconds = time.monotonic() - start
    return 2.0 * cores * COPY_ROUNDS * COPY_BYTES / seconds


def _measured(value: float, source: str) -> Figure:
    return Figure(value=value, source=f"{MEASURED}: {source}", date=datetime.now(UTC).date().isoformat())


def _bound(value: float, source: str) -> Figure:
    return Figure(value=value, source=f"{BOUND}: {source}", date="2026-11-21")
