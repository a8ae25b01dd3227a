"""Which kernel shape for which load, read from tuned.json: chosen once per device, never while serving."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Rules = tuple[dict[str, Any], ...]


def shapes(device: str, pairs: int, experts: int) -> tuple[int, int]:
    """Return the numbers of both products' shapes (shapes.cuh) for `pairs` of token and expert among `experts`."""
    rule = _choose(_rules("hopper", device), pairs, experts)
    return rule["gate_up"], rule["down"]


def tiles(device: str, pairs: int, experts: int) -> dict[str, Any]:
    """Return the fields of `fused.Tiles` for `pairs` of token and expert among `experts` on `device`."""
    rule = _choose(_rules("triton", device), pairs, experts)
    return {key: value for key, value in rule.items() if key not in ("pairs", "pairs_per_expert")}


def _choose(rules: Rules, pairs: int, experts: int) -> dict[str, Any]:
    """Return the first rule whose bounds hold: at most `pairs`, at most `pairs_per_expert`; the last has none."""
    for rule in rules:
        if pairs <= rule.get("pairs", pairs) and pairs <= rule.get("pairs_per_expert", pairs) * experts:
            return rule
    return rules[-1]


@cache
def _rules(kernel: str, device: str) -> Rules:
    """Return a kernel's rules for the device of that name, else its default's."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("tuned.json").read_text(encoding="utf-8"))[kernel]
    return tuple(table["devices"].get(device) or table["devices"][table["default"]])
