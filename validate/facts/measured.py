"""Facts about the last speed that `./inv bench.perf` measured of a server on this machine's GPU, from its result."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from sparkforge.plan import speed
from sparkforge.plan.speed import Measured
from validate.facts import checkpoint
from validate.facts.fact import Reading
from validate.facts.target import Target, once

NAMES = ("file", "at", "prompt", "answer", "concurrency", "ttft_ms", "tpot_ms")
SOURCE = "bench/**/*.json in the state, the newest that passed"


@once
def last(target: Target) -> Measured | None:
    """Return the newest result that passed, of the model being validated, served from this machine on its GPU."""
    model = checkpoint.path(target)
    return speed.newest(Path(model).name) if model else None


def _reading(name: str) -> Reading:
    def read(target: Target) -> Any:
        measured = last(target)
        return None if measured is None else getattr(measured, name)

    return Reading(f"measured.{name}", SOURCE, read)


def before_boot(target: Target) -> bool | None:
    """Whether it was measured before this machine was started; None if nothing was measured.

    A time that cannot be read counts as since: what speaks against a start must not be lost by it.
    """
    if (measured := last(target)) is None:
        return None
    try:
        return datetime.fromisoformat(measured.at).timestamp() < psutil.boot_time()
    except (ValueError, OverflowError):
        return False


READINGS = (
    *(_reading(name) for name in NAMES),
    Reading("measured.before_boot", f"{SOURCE}; /proc/stat btime", before_boot),
)
