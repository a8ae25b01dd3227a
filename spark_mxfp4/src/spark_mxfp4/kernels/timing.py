"""The time of a layer on a GPU: the median of CUDA graph replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPLAYS = 15

Layer = Callable[[int], object]


def graph_time(
    once: Layer, count: int, replays: int = REPLAYS, *, before: Callable[[], object] = lambda: None
) -> float:
    """Return the median time of one `once(i)` in µs, from replays of a CUDA graph with all i below `count`.

    `before` is called before each replay, untimed.
    """
    once(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU during capture: NCCL's watchdog queries events.
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
