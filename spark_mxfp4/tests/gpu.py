"""Helpers for tests on a GPU."""

import torch


def captured(run):
    """Run once, then return a CUDA graph of another run, and that run's result."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result
