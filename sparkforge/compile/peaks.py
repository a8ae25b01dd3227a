"""The cost of a translation unit: `peaks.toml` as measured once, and what this machine has learnt since.

Learnt figures lie in the state folder (`peaks.json`), by context (compiler, architecture) and unit. The largest
value seen counts.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.documents import read_json, read_toml
from sparkforge.core.files import fsync_directory, locked, write_json

TABLE = Path(__file__).with_name("peaks.toml")
SCHEMA = 1
UNMEASURED = "not measured"  # how the source of a last resort's row begins
# A unit of the same file name in another module has other template arguments: twice what it took is a choice, no bound.
NAMESAKE = 2.0
# What reading a file that is damaged, or that another version wrote, may raise.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Cost:
    """Peak resident size in bytes and CPU-seconds of one unit, and where the figures come from."""

    peak: int
    cpu: float
    source: str = "learnt on this machine"


@cache
def table() -> tuple[tuple[str, Cost], ...]:
    """Return the measured rows as (pattern, cost). The last one fits every unit."""
    rows = read_toml(TABLE)["unit"]
    return tuple((row["match"], Cost(row["peak"], row["cpu"], row["source"])) for row in rows)


def learnt_path() -> Path:
    """Return the file of learnt figures."""
    return paths.state() / "peaks.json"


class Peaks:
    """Costs of units under one context, such as "nvcc 13.0.88 12.1a"."""

    def __init__(self, context: str) -> None:
        self.context = context
        self.learnt = _load().get(context, {})

    @classmethod
    def of_any(cls) -> Peaks:
        """Return costs that know what was learnt under any context, the largest of each."""
        every = cls("")
        for units in _load().values():
            for unit, cost in units.items():
                old = every.learnt.get(unit, cost)
                every.learnt[unit] = Cost(max(old.peak, cost.peak), max(old.cpu, cost.cpu))
        return every

    def cost(self, unit: str) -> Cost:
        """Return the learnt cost of `unit`, such as "MODULE/FILE.cuda.o", else that of the first row that fits.

        Where only a last resort fits, what its namesake in another module or folder has used counts, doubled, but
        never more than the last resort's peak.
        """
        if unit in self.learnt:
            return self.learnt[unit]
        row = next(cost for pattern, cost in table() if fnmatch.fnmatchcase(unit, pattern))
        file = unit.rpartition("/")[2]
        known = [cost for name, cost in self.learnt.items() if name.rpartition("/")[2] == file]
        if not known or not row.source.startswith(UNMEASURED):
            return row
        peak, cpu = max(cost.peak for cost in known), max(cost.cpu for cost in known)
        return Cost(min(row.peak, int(NAMESAKE * peak)), cpu, f"{NAMESAKE:g} x what {file} took elsewhere")

    def learn(self, used: Mapping[str, Cost]) -> None:
        """Keep what units have used, in the file too, which other processes may have changed meanwhile.

        A file that cannot be read or understood is kept under another name.
        """
        with locked(learnt_path().with_suffix(".lock"), "record what units cost"):
            try:
                contexts = _read()
            except UNREADABLE as error:
                path, contexts = learnt_path(), {}
                names = (path.with_name(f"{path.name}.unreadable{number or ''}") for number in count())
                aside = next(name for name in names if not os.path.lexists(name))
                path.rename(aside)
                fsync_directory(path.parent)
                say(f"{path} cannot be read ({error}); it is kept as {aside.name}, and learning starts over")
            costs = contexts.setdefault(self.context, {})
            for unit, cost in used.items():
                old = costs.get(unit, Cost(0, 0.0))
                costs[unit] = Cost(max(old.peak, cost.peak), round(max(old.cpu, cost.cpu), 1))
            rows = {
                context: {unit: {"peak": cost.peak, "cpu": cost.cpu} for unit, cost in units.items()}
                for context, units in contexts.items()
            }
            write_json(learnt_path(), {"schema": SCHEMA, "contexts": rows})
        self.learnt = costs


def _load() -> dict[str, dict[str, Cost]]:
    """Return the learnt figures; a file that cannot be read or understood teaches nothing."""
    try:
        return _read()
    except UNREADABLE:
        return {}


def _read() -> dict[str, dict[str, Cost]]:
    """Read the learnt figures; none if there is no file. Raises one of UNREADABLE for a file that is not ours."""
    try:
        stored = read_json(learnt_path())
    except FileNotFoundError:
        return {}
    if stored["schema"] != SCHEMA:
        raise ValueError(f"its schema is {stored['schema']}, and this Sparkforge reads {SCHEMA}")
    return {
        context: {unit: Cost(int(row["peak"]), float(row["cpu"])) for unit, row in units.items()}
        for context, units in stored["contexts"].items()
    }
