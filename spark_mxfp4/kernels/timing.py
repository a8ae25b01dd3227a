"""Timing one layer on a GPU: the sizes of a layer, the median of CUDA graph replays, and a row of figures."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
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


def graph_time(
    once: Layer, count: int, replays: int = REPLAYS, *, before: Callable[[], object] = lambda: None
) -> float:
    """Return the median time of `once(i)` in µs, for i below `count` in one CUDA graph, replayed.

    `before` is called before each replay, untimed.
    """
    once(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile: NCCL's watchdog asks for events.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(count):
            once(i)
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = _event(), _event()
        before()
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


def token_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of tokens of a command line, given with commas. Raises what argparse prints as one line."""
    if not all(word.isdecimal() and int(word) for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers above 0 · give them as in 1,64")
    return tuple(map(int, text.split(",")))


def output_file(text: str) -> Path:
    """Return a command line's file for figures. Raises what argparse prints as one line."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is in no folder that exists · mkdir -p {Path(text).parent}")
    return Path(text)


def count_of(tokens: int) -> int:
    """Return how many layers one graph runs: enough to hide its launch."""
    return 5 * LAYERS if tokens <= 256 else 2 * LAYERS


def print_row(title: str, row: dict[str, Any]) -> None:
    """Print one measurement as a line."""
    sys.stdout.write(f"{title}: " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()) + "\n")
    sys.stdout.flush()
