"""Shared code of the measurements: sizes of layers, ceilings of a GPU, rows of figures, command-line options."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from spark_mxfp4.kernels.check import LayerSizes
from spark_mxfp4.kernels.timing import graph_time

LAYERS = 4  # run in turn, so that no weights are in cache


def ceilings() -> dict[str, float]:
    """Return this GPU's copy bandwidth in GB/s (read and written) and bf16 matrix rate in TFLOP/s, on random data."""
    copy = _copy_rate()
    torch.cuda.empty_cache()
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return {"copy_gbs": copy, "bf16_tflops": 2 * 8192**3 / graph_time(lambda _: left @ right, 20) / 1e6}


def _copy_rate() -> float:
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / graph_time(lambda _: torch.add(a, 1, out=b), 3) / 1e3


def figures(model: LayerSizes, tokens: int, touched: float, us: float) -> dict[str, float]:
    """Return a measurement as weights in GB/s and products in TFLOP/s."""
    return {
        "tokens": tokens, "experts_hit": touched, "us": round(us, 2),
        "weights_gbs": round(model.weight_bytes(touched) / us / 1e3),
        "tflops": round(model.operations(tokens) / us / 1e6, 1),
    }  # fmt: skip


def token_counts(text: str) -> tuple[int, ...]:
    """Parse comma-separated numbers of tokens. Raises argparse.ArgumentTypeError, which argparse prints in one line."""
    if not all(word.isdecimal() and int(word) for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers above 0 · give them as in 1,64")
    return tuple(map(int, text.split(",")))


def output_file(text: str) -> Path:
    """Parse the path of the file for figures. Raises argparse.ArgumentTypeError, which argparse prints in one line."""
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
