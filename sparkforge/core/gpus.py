"""Queries of NVIDIA GPUs by nvidia-smi. On cluster nodes, which do not have our code, probe.py queries them."""

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

from sparkforge.core.process import ProbeError, ask, require

SECONDS = 5.0  # nvidia-smi hangs with a broken driver
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the GPUs that a user chose: comma-separated indices or UUIDs
HIDING = ("", "-1", "NoDevFiles")  # values with which CUDA sees no GPU


def hidden(env: Mapping[str, str]) -> bool:
    """Tell whether `env` hides every GPU from CUDA."""
    return VISIBLE in env and env[VISIBLE].strip() in HIDING


def query(*fields: str, units: bool = True, env: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return field → text for each GPU, or for each that CUDA_VISIBLE_DEVICES in `env` names.

    `units`: sizes as "143771 MiB", else as "143771". Raises ProbeError if nvidia-smi is absent, fails, hangs or lists
    no GPU.
    """
    form = "csv,noheader" if units else "csv,noheader,nounits"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", f"--format={form}"]
    if env and env.get(VISIBLE) and not hidden(env):
        command.append(f"--id={env[VISIBLE]}")  # nvidia-smi itself does not read the variable
    answer = ask(command, seconds=SECONDS, env=env)
    lines = require(answer, "nvidia-smi", SECONDS).splitlines()
    rows = [row for row in csv.reader(lines, skipinitialspace=True) if len(row) == len(fields)]
    if not rows:
        raise ProbeError("nvidia-smi lists no GPU")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def number(text: str) -> float | None:
    """Return a field's text as a number; None for [N/A] and [Not Supported]."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def held() -> dict[int, int]:
    """Return process id → bytes of GPU memory that it holds; empty where nvidia-smi is absent, fails or hangs."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    sizes = Counter[int]()
    with suppress(ProbeError, ValueError):
        for line in require(ask(command, seconds=SECONDS), "nvidia-smi", SECONDS).splitlines():
            pid, _, size = line.partition(",")
            sizes[int(pid)] += int((number(size) or 0) * 2**20)
    return sizes


# The fields of `states`. A Spark reports no power limit.
STATE_FIELDS = (
    *("clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu", "utilization.gpu"),
    "clocks_event_reasons.active",
)
BUSY = 0.5  # share of the last second in which a kernel ran; a less busy GPU may lower its clock
HALF = 0.5  # of the highest SM clock. A healthy Spark keeps 2,400 of 3,003 MHz under load (docs/hardware.md)
IDLE = 0x1
POWER_CYCLE = (
    "sudo poweroff   # pull the power supply from the wall and from the machine for 60 s, and start again; "
    "see docs/hardware.md#power-and-clocks"
)
COOL = "nvidia-smi -q -d TEMPERATURE,PERFORMANCE   # let it cool and free its air inlets first"
SETTING = "sudo nvidia-smi -rgc   # removes a limit that somebody set"


class ClockReason(NamedTuple):
    """A bit of nvidia-smi's clocks_event_reasons; if `alone`, it is a fault at any clock."""

    name: str
    fix: str
    alone: bool = False


# nvml.h, nvmlClocksEventReasons.
REASONS = {
    IDLE: ClockReason("idle", ""),
    0x2: ClockReason("clock setting", SETTING),
    0x4: ClockReason("software power cap", POWER_CYCLE),
    0x8: ClockReason("hardware slowdown", POWER_CYCLE, alone=True),
    0x10: ClockReason("sync boost", SETTING),
    0x20: ClockReason("software thermal slowdown", COOL, alone=True),
    0x40: ClockReason("hardware thermal slowdown", COOL, alone=True),
    0x80: ClockReason("hardware power brake", POWER_CYCLE, alone=True),
    0x100: ClockReason("display clock setting", SETTING),
}


@dataclass(frozen=True)
class GpuState:
    """Clocks (MHz), power (W), temperature (°C) and load (0 to 1) of a GPU; None where the driver has no figure."""

    clock: float | None
    max_clock: float | None
    power: float | None
    power_limit: float | None
    temperature: float | None
    busy: float | None
    reasons: int

    @classmethod
    def read(cls, row: Mapping[str, object]) -> Self:
        """Return the state that a row of STATE_FIELDS describes; fields may be missing."""
        *texts, mask = (str(row.get(field)) for field in STATE_FIELDS)
        clock, max_clock, power, power_limit, temperature, busy = map(number, texts)
        reasons = int(mask, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", mask) else 0
        busy = None if busy is None else busy / 100
        return cls(clock, max_clock, power, power_limit, temperature, busy, reasons)

    @property
    def active(self) -> list[ClockReason]:
        """The driver's reasons for a lowered clock."""
        return [reason for bit, reason in REASONS.items() if self.reasons & bit]

    def describe(self) -> str:
        """Return the known figures in one line; empty if there are none."""
        clock = f"SM clock {self.clock:.0f}" if self.clock is not None else ""
        clock += f" of {self.max_clock:.0f}" if clock and self.max_clock is not None else ""
        limit = f" of {self.power_limit:.0f}" if self.power_limit is not None else ""
        parts = [f"{clock} MHz"] if clock else []
        parts += [f"{self.power:.0f}{limit} W"] if self.power is not None else []
        parts += [f"{self.temperature:.0f} °C"] if self.temperature is not None else []
        parts += [f"busy {self.busy:.0%}"] if self.busy is not None else []
        return ", ".join(parts)

    def fault(self) -> tuple[str, str]:
        """Return the reason for a low clock and the next command; two empty texts if the clock is in order.

        A low clock is a fault only under load; a Spark's power supply can cause it although the driver names no reason.
        """
        slow = self.clock is not None and self.max_clock is not None and self.clock < HALF * self.max_clock
        low = slow and self.busy is not None and self.busy >= BUSY and not self.reasons & IDLE
        causes = [reason for reason in self.active if reason.fix and (low or reason.alone)]
        if not low and not causes:
            return "", ""
        names = ", ".join(reason.name for reason in causes) or "the driver names no reason"
        kept = "the clock is below half of its highest under load" if low else "the driver lowers the clock"
        return f"{kept} ({names}): {self.describe()}", causes[0].fix if causes else POWER_CYCLE


def states(env: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return a row of STATE_FIELDS for each GPU, without units, for `GpuState.read`. Raises ProbeError as `query`."""
    return query(*STATE_FIELDS, units=False, env=env)
