"""Choose kernel shapes by load: from tuned.json, or from a result of `search` for sizes that the file lacks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

Rules = tuple[dict[str, Any], ...]
Pair = tuple[int, int]  # the kernel shape of each of the two products, as a number in shapes.cuh


class LaidOut(NamedTuple):
    """A layer in `hopper`'s layout: the number of experts on this device, and both sizes padded to whole tiles."""

    experts: int
    hidden: int
    intermediate: int


_adopted: dict[tuple[str, LaidOut], Rules] = {}


def shapes(device: str, pairs: int, sizes: LaidOut) -> Pair | None:
    """Return both products' shapes for `pairs` of token and expert in a layer of `sizes`.

    None means that `hopper.whole_layer` computes the layer.
    """
    usual = default_shapes(device, pairs, sizes)
    rules = _adopted.get((device, sizes))
    if usual is None or rules is None:
        return usual
    rule = _choose(rules, pairs, sizes.experts)
    return rule["gate_up"], rule["down"]


def default_shapes(device: str, pairs: int, sizes: LaidOut) -> Pair | None:
    """Return the table's shapes for `pairs` of token and expert in a layer of `sizes`, without a search's result."""
    rule = _choose(_rules("hopper", device), pairs, sizes.experts, sizes.intermediate)
    return None if rule.get("whole_layer") else (rule["gate_up"], rule["down"])


def known(device: str, sizes: LaidOut) -> bool:
    """Return whether shapes for these sizes were measured on this device, for the table or by a search."""
    return (device, sizes) in _adopted or list(sizes) in _table("hopper")["measured"].get(device, [])


def adopt(device: str, sizes: LaidOut, rules: Rules) -> None:
    """Use `rules` for layers of `sizes` from now on."""
    _adopted[device, sizes] = rules


def tiles(device: str, pairs: int, experts: int) -> dict[str, Any]:
    """Return the fields of `fused.Tiles` for `pairs` of token and expert among `experts` on `device`."""
    return _fields("triton", device, pairs, experts)


def plan(device: str, pairs: int, experts: int) -> dict[str, Any]:
    """Return the fields of `hopper.LayerPlan` for a GPU whose blocks have little shared memory; see `tiles`."""
    return _fields("layer", device, pairs, experts)


def _fields(kernel: str, device: str, pairs: int, experts: int) -> dict[str, Any]:
    rule = _choose(_rules(kernel, device), pairs, experts)
    return {key: value for key, value in rule.items() if key not in ("pairs", "pairs_per_expert")}


def _choose(rules: Rules, pairs: int, experts: int, intermediate: int = 0) -> dict[str, Any]:
    """Return the first rule whose limits (`pairs`, `pairs_per_expert`, `intermediate`) hold; the last has no limits."""
    for rule in rules:
        of_expert, width = rule.get("pairs_per_expert", pairs), rule.get("intermediate", intermediate)
        if pairs <= rule.get("pairs", pairs) and pairs <= of_expert * experts and intermediate <= width:
            return rule
    return rules[-1]


@cache
def _rules(kernel: str, device: str) -> Rules:
    """Return a kernel's rules for the device of that name, else its default rules."""
    table = _table(kernel)
    return tuple(table["devices"].get(device) or table["devices"][table["default"]])


@cache
def _table(kernel: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("tuned.json").read_text(encoding="utf-8"))[kernel]
    return table
