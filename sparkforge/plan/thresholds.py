"""The memory that must stay available (thresholds.toml), for plans and for the guard that watches a server.

The guard imports this module, so it depends on the standard library only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from sparkforge.core.memory import GIB

VARIABLE = "SPARKFORGE_GUARD_GIB"  # MemAvailable below which a server is ended; 0: no guard
TABLE = Path(__file__).with_name("thresholds.toml")


@dataclass(frozen=True)
class Thresholds:
    """The table's values: seconds, shares from 0 to 1, GiB, and `looks`, a number of samples."""

    period_seconds: float
    looks: float
    end_gib: float
    end_share: float
    kill_gib: float
    kill_share: float
    grace_seconds: float

    def end_below(self, total: int) -> int:
        """Bytes available, of `total`, below which the server is sent SIGTERM. A plan leaves this much free."""
        return int(min(self.end_gib * GIB, self.end_share * total))

    def kill_below(self, total: int) -> int:
        """Bytes available, of `total`, below which the server is killed at once."""
        return int(min(self.kill_gib * GIB, self.kill_share * total))

    def moved_to(self, end_gib: float) -> Thresholds:
        """Return the thresholds with `end_gib`, and with half of it as `kill_gib`."""
        return replace(self, end_gib=end_gib, kill_gib=end_gib / 2)


def load() -> Thresholds:
    """Return the values of the table."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return Thresholds(**{field.name: table[field.name]["value"] for field in fields(Thresholds)})


def configured(env: Mapping[str, str]) -> Thresholds | None:
    """Return the thresholds with VARIABLE's bound; None for 0, no guard. Raises ValueError outside 0 to 1024 GiB."""
    text = env.get(VARIABLE, "")
    if not text:
        return load()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1024:
        raise ValueError(f"{VARIABLE} is {text[:40]!r}, not a number of GiB from 0")
    return load().moved_to(value) if value else None
