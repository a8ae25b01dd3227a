"""The cost of a translation unit, as `peaks.toml` has it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sparkforge.core.documents import read_toml

TABLE = Path(__file__).with_name("peaks.toml")


@dataclass(frozen=True)
class Cost:
    """Peak resident size in bytes and CPU-seconds of one unit, and where the figures come from."""

    peak: int
    cpu: float
    source: str = ""


@cache
def table() -> tuple[tuple[str, Cost], ...]:
    """Return the measured rows as (pattern, cost). The last one fits every unit."""
    rows = read_toml(TABLE)["unit"]
    return tuple((row["match"], Cost(row["peak"], row["cpu"], row["source"])) for row in rows)


def cost(unit: str) -> Cost:
    """Return the cost of `unit`, such as "MODULE/FILE.cuda.o": that of the first row that fits."""
    return next(cost for pattern, cost in table() if fnmatch.fnmatchcase(unit, pattern))
