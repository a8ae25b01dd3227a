"""Find the fastest shapes of the Hopper kernel for a layer that is not in tuned.json, by timing them once, at load.

A *load* is a number of pairs of token and expert. Small loads, which one launch computes, are not searched. For some
other loads a cost model orders the shapes, and the first few are timed in CUDA graphs on the layer itself. The result
is used for all layers of these sizes, and stored as one JSON file for each device, sizes and version of the kernels.
Nothing is searched while a CUDA graph is captured or while serving. Every shape gives right results, so ranks may
choose different shapes; a sum's last bit depends on the shape.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import operator
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spark_mxfp4.kernels import precompile, tuning
from spark_mxfp4.kernels.check import random_routing
from spark_mxfp4.kernels.timing import graph_time
from spark_mxfp4.kernels.tuning import LaidOut, Pair

SEARCH_VARIABLE = "SPARK_MXFP4_SEARCH"
SECONDS = 10.0  # after this time the remaining loads keep the shapes of tuned.json
SMALLEST_SHARE, LARGEST_SHARE, MOST_PAIRS = 2.0**-2, 256, 65536  # range of timed pairs per expert; most timed pairs
CANDIDATES, PARTNERS = 8, 3  # shapes timed for both products; of these, how many are tried for one product alone
GAIN = 0.98  # a pair must be 2 % faster than the table's pair to replace it: less is noise
ROUTES, REPLAYS = 8, 5  # layers in one graph, each with its own routing so that weights leave the cache; replays
EXPANSION = 32  # tokens for which a tile's product takes as long as expanding its weights: an estimate, not measured

logger = logging.getLogger(__name__)
Timer = Callable[[int, Pair], float]  # (pairs, shapes) → µs
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Pair], torch.Tensor]  # (x, ids, shares, shapes) → output


class SearchKey(NamedTuple):
    """The key of a stored result: the kernels' version, the device's name and the layer's padded sizes."""

    kernels: str
    device: str
    sizes: LaidOut

    def path(self) -> Path:
        """Return the result's file in the user's cache folder."""
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        version = hashlib.sha256(self.kernels.encode()).hexdigest()[:12]
        device = re.sub(r"\W+", "-", self.device)
        return Path(home) / "spark-mxfp4" / f"{device}-{'x'.join(map(str, self.sizes))}-{version}.json"


def enabled() -> bool:
    """Return whether SPARK_MXFP4_SEARCH is `on` (default: `off`). Raises ValueError for another value."""
    value = os.environ.get(SEARCH_VARIABLE) or "off"
    if value not in ("on", "off"):
        raise ValueError(f"{SEARCH_VARIABLE} is {value!r} · it can be on or off · set one of them, or unset it")
    return value == "on"


def tune(device: torch.device, sizes: LaidOut, widths: Sequence[int], layer: Layer) -> None:
    """Choose shapes for layers of `sizes` on `device`, unless the table has these sizes or a result is stored.

    `widths` are the tokens of a tile of each shape, by number; `layer` runs one layer. If a search fails, the table's
    shapes are used and the log has a warning; loading goes on.
    """
    name = torch.cuda.get_device_name(device)
    if not enabled() or tuning.known(name, sizes) or torch.cuda.is_current_stream_capturing():
        return
    key = SearchKey(precompile.file_name(precompile.HOPPER, "90a"), name, sizes)
    rules = read(key.path(), len(widths))
    if rules is None:
        begun = time.monotonic()
        try:
            rules = choose(sizes, widths, key.device, timer(device, sizes, layer), begun + SECONDS)
        except RuntimeError as error:  # an error of CUDA, such as out of memory
            logger.warning("kernel shapes for %s were not searched · %s · the table's are used", tuple(sizes), error)
            return
        logger.info("kernel shapes for %s were searched in %.1f s", tuple(sizes), time.monotonic() - begun)
        keep(key, rules)
    tuning.adopt(name, sizes, rules)


def loads(device: str, sizes: LaidOut) -> list[int]:
    """Return the numbers of pairs to time for layers of `sizes`: those with one launch for each product."""
    doubled = itertools.accumulate(itertools.repeat(2), operator.mul, initial=SMALLEST_SHARE)
    many = (int(sizes.experts * share) for share in itertools.takewhile(lambda share: share <= LARGEST_SHARE, doubled))
    timed = (pairs for pairs in many if 1 <= pairs <= MOST_PAIRS)
    return [pairs for pairs in timed if tuning.default_shapes(device, pairs, sizes) is not None]


def candidates(pairs: int, experts: int, widths: Sequence[int]) -> list[int]:
    """Return the numbers of the shapes worth timing, the most promising first.

    The cost of a tile is the expansion of its weights plus a part proportional to its width. An expert with more tokens
    than a tile holds takes several tiles.
    """
    share = pairs / experts
    tokens = max(1.0, share + math.sqrt(share))

    def cost(number: int) -> float:
        return math.ceil(tokens / widths[number]) * EXPANSION + widths[number] / 4

    return sorted(range(len(widths)), key=cost)[:CANDIDATES]


def choose(
    sizes: LaidOut,
    widths: Sequence[int],
    device: str,
    timed: Timer,
    until: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuning.Rules:
    """Return rules for every load, timed by `timed`; once `clock` reaches `until`, loads keep the table's shapes."""
    numbers = loads(device, sizes)
    best = []
    for pairs in numbers:
        usual = tuning.default_shapes(device, pairs, sizes)
        if usual is not None:
            best.append(usual if clock() >= until else _fastest(pairs, sizes.experts, widths, usual, timed))
    bounds = [int(math.sqrt(low * high)) for low, high in itertools.pairwise(numbers)]
    rules: list[dict[str, Any]] = []
    for bound, (gate_up, down) in itertools.zip_longest(bounds, best):
        rules.append({**({} if bound is None else {"pairs": bound}), "gate_up": gate_up, "down": down})
    return tuple(rules)


def _fastest(pairs: int, experts: int, widths: Sequence[int], usual: Pair, timed: Timer) -> Pair:
    """Return the fastest pair of shapes: try the same shape for both products first, then different shapes."""
    times = {usual: timed(pairs, usual)}
    for number in candidates(pairs, experts, widths):
        if (number, number) not in times:
            times[number, number] = timed(pairs, (number, number))
    same = sorted((pair for pair in times if pair[0] == pair[1]), key=lambda pair: times[pair])
    first = same[0][0]
    partners = {*(pair[0] for pair in same[1:PARTNERS]), *usual} - {first}
    for pair in sorted({*((first, other) for other in partners), *((other, first) for other in partners)} - {*times}):
        times[pair] = timed(pairs, pair)
    gate_up = min((pair for pair in times if pair[1] == first), key=lambda pair: times[pair])[0]
    down = min((pair for pair in times if pair[0] == first), key=lambda pair: times[pair])[1]
    if (gate_up, down) not in times:
        times[gate_up, down] = timed(pairs, (gate_up, down))
    fastest = min(times, key=lambda pair: times[pair])
    return fastest if times[fastest] < GAIN * times[usual] else usual


def timer(device: torch.device, sizes: LaidOut, layer: Layer) -> Timer:
    """Return a timer of `layer` on `device`: the median of graph replays, with random activations and routings."""
    inputs: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def timed(pairs: int, shapes: Pair) -> float:
        if pairs not in inputs:
            inputs.clear()
            top_k = next(k for k in (4, 2, 1) if pairs % k == 0 and k <= sizes.experts)
            with torch.random.fork_rng([device]):  # a seeded run gets the same random numbers with and without a search
                x = torch.randn(pairs // top_k, sizes.hidden, dtype=torch.bfloat16, device=device)
                routes = [random_routing(len(x), sizes.experts, top_k, device=device) for _ in range(ROUTES)]
            inputs[pairs] = x, routes
        x, routes = inputs[pairs]
        us = graph_time(lambda i: layer(x, *routes[i], shapes), ROUTES, REPLAYS)
        torch.cuda.empty_cache()  # else the graph's memory stays reserved
        return us

    return timed


def read(path: Path, shapes: int) -> tuning.Rules | None:
    """Return the rules stored in a file; None if it is missing, damaged, or names unknown shapes."""
    try:
        rules = json.loads(path.read_text(encoding="utf-8"))["rules"]
        bounds = [rule["pairs"] for rule in rules[:-1]]
        chosen = [rule[product] for rule in rules for product in ("gate_up", "down")]
        whole = all(type(value) is int for value in (*bounds, *chosen)) and bounds == sorted(bounds)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    whole = whole and bool(chosen) and "pairs" not in rules[-1] and all(0 <= number < shapes for number in chosen)
    return tuple(rules) if whole else None


def keep(key: SearchKey, rules: tuning.Rules) -> None:
    """Store a result atomically; if writing fails, the next start searches again."""
    path = key.path()
    text = json.dumps({**key._asdict(), "sizes": key.sizes._asdict(), "rules": rules}, indent=1) + "\n"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
