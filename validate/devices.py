"""Devices to plan for: `devices.toml`, and this machine as the validator's own facts describe it."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from sparkforge.errors import UsageError
from validate import gpu, machine
from validate.facts import Fact, Facts, Reading, gather
from validate.scene import Options, Scene
from validate.tables import BOUND, MEASURED, Figure, Record, load

FILE = Path(__file__).with_name("devices.toml")
THIS = "this"
GIB = 1 << 30
COPY_BYTES = 32 << 20  # a thread's buffer; two of them are more than its share of a cache
COPY_THREADS = 20  # as many cores as a Spark has: at most 1.3 GB for a moment
COPY_ROUNDS = 4
CPU_HOST = 4.0  # GiB beside weights and KV cache: vLLM's CPU build took 3.7 GB with the tiny model, x86-64, eager
CPU_PROFILES = ("embedded",)


class Device(Record):
    """What serves. Memory in GiB, bandwidth in GB/s, rates in TFLOP/s without sparsity; None: not known.

    `resident` is in use before a server starts, `runtime` what vLLM's share holds besides weights, KV cache and
    activations, `host` what vLLM takes outside its share of a unified memory, `most` the highest share for vLLM,
    `align` what the experts' sizes are padded to.
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

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that a server can see."""
        return int(self.memory.value * GIB)

    @property
    def bytes_a_second(self) -> float | None:
        """Memory bandwidth in bytes a second."""
        return self.bandwidth.value * 1e9 if self.bandwidth else None

    def flops(self, rate: str) -> float | None:
        """Arithmetic of one kind in FLOP a second; None if it is not known."""
        return self.rates[rate].value * 1e12 if rate in self.rates else None


class Devices(Record):
    """The whole file."""

    devices: dict[str, Device]


def table(path: Path = FILE) -> dict[str, Device]:
    """Return every device by name. Raises PlanTableError."""
    return load(path, Devices).devices


def choose(name: str) -> Device:
    """Return the device called `name`, or this machine. Raises UsageError for an unknown name."""
    if name == THIS:
        return this_machine()
    known = table()
    if name not in known:
        told = ", ".join((*known, THIS))
        raise UsageError(f"no device {name!r}", f"there are {told}", "./inv plan --device spark")
    return known[name]


def by_gpu(name: str) -> Device | None:
    """Return the device whose GPU calls itself `name`; None for one that the table does not have."""
    words = name.replace("-", " ")
    return next((d for d in table().values() if any(known in words for known in d.names)), None)


def this_machine() -> Device:
    """Return this machine: the table's row for its GPU with the memory that is there, or the processor alone.

    Raises UsageError for a GPU that the table does not have, or if not even the memory can be read.
    """
    scene = Scene(Options(), "embedded")
    copying = (Reading("memory.copy_bytes_per_second", "copies of buffers, all cores", lambda _: copy_speed()),)
    facts = gather(scene, (machine.READINGS, gpu.SMI_READINGS, gpu.CUDA_READINGS))
    name = str(facts["gpu.name"].value or "")
    known = by_gpu(name)
    if name and known is None:
        fix = f"add it to validate/{FILE.name}, with a source for each figure; or choose another --device"
        raise UsageError(f"the GPU {name} is not known", f"validate/{FILE.name} has no row for it", fix)
    if known is None:
        facts |= gather(scene, (copying,))
    return described(facts, known)


def described(facts: Facts, known: Device | None) -> Device:
    """Return the device that facts describe. `known` is the table's row for its GPU. Raises UsageError."""
    total, available = facts["memory.total_bytes"], facts["memory.available_bytes"]
    if total.value is None or available.value is None:
        why = total.error or available.error or "the kernel told no figure"
        raise UsageError("this machine's memory is not known", why, "./inv plan --device spark")
    if known and not known.unified:
        return known.model_copy(update={"about": f"this machine: {facts['gpu.name'].value}"})
    limit = facts["memory.cgroup_headroom_bytes"].value
    free = min(available.value, limit) if isinstance(limit, int) else available.value
    resident = _measured((total.value - free) / GIB, "MemTotal - MemAvailable, within the container's limit")
    memory = _measured(total.value / GIB, total.source)
    if known:
        about = f"this machine: {facts['gpu.name'].value}"
        return known.model_copy(update={"about": about, "memory": memory, "resident": resident})
    return _processor(memory, resident, facts.get("memory.copy_bytes_per_second"))


def copy_speed() -> float:
    """Measure the bytes a second that this machine's memory moves, read and written, with a thread on every core."""
    cores = min(COPY_THREADS, len(os.sched_getaffinity(0)))
    pairs = [(ctypes.create_string_buffer(COPY_BYTES), ctypes.create_string_buffer(COPY_BYTES)) for _ in range(cores)]

    def copy(pair: tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]) -> None:
        """Copy the second buffer onto the first, COPY_ROUNDS times."""
        for _ in range(COPY_ROUNDS):
            ctypes.memmove(pair[0], pair[1], COPY_BYTES)  # releases the interpreter's lock

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(copy, pairs))  # the first touch of every page is not counted
        begun = time.monotonic()
        list(pool.map(copy, pairs))
        took = time.monotonic() - begun
    return 2.0 * cores * COPY_ROUNDS * COPY_BYTES / took


def _processor(memory: Figure, resident: Figure, copied: Fact | None) -> Device:
    speed = copied.value if copied else None
    return Device(
        about="this machine: its processor",
        names=(),
        unified=True,
        experts="bf16",
        align=1,
        profiles=CPU_PROFILES,
        why_experts="vLLM's CPU build computes in bf16",
        why_align="our plugin takes the sizes as they are",
        memory=memory,
        resident=resident,
        runtime=_bound(0.0, "without a GPU there are none"),
        host=_bound(CPU_HOST, "vLLM's CPU build took 3.7 GB with the tiny model"),
        most=_bound(1.0, "there is no share to keep to on a processor"),
        bandwidth=_measured(speed / 1e9, f"{copied.source}, in this very run") if copied and speed else None,
    )


def _measured(value: float, source: str) -> Figure:
    return Figure(value=value, source=f"{MEASURED}: {source}", date=datetime.now(UTC).date().isoformat())


def _bound(value: float, source: str) -> Figure:
    return Figure(value=value, source=f"{BOUND}: {source}", date="2026-11-21")
