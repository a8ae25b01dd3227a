"""Timing one layer on a GPU: the sizes of a layer, the median of CUDA graph replays, and a row of figures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

LAYERS, REPLAYS = 4, 15
BITS = 4.25


class LayerSizes(NamedTuple):
    """The sizes of one layer."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def weight_bytes(self, touched: float) -> float:
        """Return the bytes of `touched` experts' weights and scales."""
        return touched * 3 * self.hidden * self.intermediate * BITS / 8

    def operations(self, tokens: int) -> float:
        """Return the floating-point operations of both products for `tokens`."""
        return 6.0 * tokens * self.top_k * self.hidden * self.intermediate


Layer = Callable[[int], object]


def graph_time(once: Layer, count: int, replays: int = REPLAYS) -> float:
    """Return the median time of `once(i)` in µs, for i below `count` in one CUDA graph, replayed."""
    once(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            once(i)
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times)) * 1e3 / count


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def figures(model: LayerSizes, tokens: int, touched: float, us: float) -> dict[str, float]:
    """Return a measurement as weights in GB/s and products in TFLOP/s."""
    return {
        "tokens": tokens, "experts_hit": touched, "us": round(us, 2),
        "weights_gbs": round(model.weight_bytes(touched) / us / 1e3),
        "tflops": round(model.operations(tokens) / us / 1e6, 1),
    }  # fmt: skip


def count_of(tokens: int) -> int:
    """Return how many layers one graph runs: enough to hide its launch."""
    return 5 * LAYERS if tokens <= 256 else 2 * LAYERS


def print_row(title: str, row: dict[str, Any]) -> None:
    """Print one measurement as a line."""
    sys.stdout.write(f"{title}: " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()) + "\n")
    sys.stdout.flush()
