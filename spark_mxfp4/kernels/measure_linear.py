"""`python -m spark_mxfp4.kernels.measure_linear`: how fast the dense products are on this GPU, beside torch's.

Every time is the median of CUDA graph replays. A graph runs several matrices in turn, so that no weight is in cache,
and each product waits for the one before it, as in a model. The peers are torch's bf16 product and its FP8 product with
one scale a row (cuBLAS), the latter alone and with the quantisation of activations in front of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spark_mxfp4.kernels.check import error
from spark_mxfp4.kernels.linear import Format, Weight, reference, run
from spark_mxfp4.kernels.measure import ceilings
from spark_mxfp4.kernels.timing import REPLAYS, graph_time, print_row
from spark_mxfp4.mxfp4 import E4M3_LARGEST

SHAPES = {  # rows by columns, gpt-oss-120b
    "qkv": (5120, 2880), "o": (2880, 4096), "head": (201_088, 2880),
    "qkv, one of two devices": (2560, 2880), "o, one of two devices": (2880, 2048),
    "head, one of two devices": (100_544, 2880),
}  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 32, 64)
CACHE = 1 << 28  # bytes of weights that no cache keeps


def measure(rows: int, columns: int, tokens: tuple[int, ...], copy: float) -> list[dict[str, Any]]:
    """Return a row for each format and number of tokens: time, share of the copy bandwidth, error; peers likewise."""
    count = max(2, CACHE // (rows * columns // 2))
    matrices = [torch.randn(rows, columns, device="cuda").bfloat16() * 0.02 for _ in range(count)]
    result = []
    for number in tokens:
        x = torch.randn(number, columns, device="cuda").bfloat16()
        us = graph_time(partial(_multiply, x, matrices), 2 * count)
        result.append(_row("bf16", number, us, matrices[0].nbytes, copy))
    result += _fp8(matrices, tokens, copy)
    for format_ in Format:
        weights = [Weight.pack(matrix, format_) for matrix in matrices]
        exact = reference(matrices[0], format_)
        for number in tokens:
            x = torch.randn(number, columns, device="cuda").bfloat16()
            off = error(run(x, weights[0]), x.float() @ exact.T)
            us = graph_time(partial(_run, x, weights), 2 * count)
            result.append({**_row(format_.name, number, us, weights[0].nbytes, copy), "error": off})
        del weights, exact
    return result


def _multiply(x: torch.Tensor, matrices: list[torch.Tensor], i: int) -> torch.Tensor:
    return x @ matrices[i % len(matrices)].T


def _run(x: torch.Tensor, weights: list[Weight], i: int) -> torch.Tensor:
    return run(x, weights[i % len(weights)])


def _fp8(matrices: list[torch.Tensor], tokens: tuple[int, ...], copy: float) -> list[dict[str, Any]]:
    weights = [matrix.to(torch.float8_e4m3fn) for matrix in matrices]
    scale = torch.ones(1, matrices[0].shape[0], device="cuda")

    def multiply(x: torch.Tensor, x_scale: torch.Tensor, i: int) -> torch.Tensor:
        """Return the product of E4M3 `x` [M, K] with matrix `i`, bfloat16 [M, N]."""
        return torch._scaled_mm(  # noqa: SLF001 (torch has no other name for it)
            x, weights[i % len(weights)].T, x_scale, scale, out_dtype=torch.bfloat16
        )

    def with_quantisation(x: torch.Tensor, i: int) -> torch.Tensor:
        """Quantise bfloat16 `x` [M, K] by rows to E4M3, then multiply."""
        x_scale = x.abs().amax(1, keepdim=True).float() / E4M3_LARGEST
        return multiply((x / x_scale).to(torch.float8_e4m3fn), x_scale, i)

    rows = []
    for number in tokens:
        x = torch.randn(number, matrices[0].shape[1], device="cuda").bfloat16()
        x_fp8, unit_scale = x.to(torch.float8_e4m3fn), torch.ones(number, 1, device="cuda")
        product_us = graph_time(partial(multiply, x_fp8, unit_scale), 2 * len(weights))
        total_us = graph_time(partial(with_quantisation, x), 2 * len(weights))
        rows += [
            _row("cuBLAS FP8", number, product_us, weights[0].nbytes, copy),
            _row("cuBLAS FP8 with quantisation", number, total_us, weights[0].nbytes, copy),
        ]
    return rows


def _row(name: str, tokens: int, us: float, nbytes: int, copy: float) -> dict[str, Any]:
    return {"name": name, "tokens": tokens, "us": round(us, 2), "of_copy": round(nbytes / us / 1e3 / copy, 3)}


def main() -> None:
    """Measure what the flags ask for and save JSON."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", required=True, help="JSON file for the figures")
    flags.add_argument("--tokens", help="with commas; default: 1 to 64")
    arguments = flags.parse_args()
    if not torch.cuda.is_available():
        sys.exit("cannot measure · torch sees no NVIDIA GPU · use a GPU machine and a torch that is built for CUDA")
    tokens = tuple(map(int, arguments.tokens.split(","))) if arguments.tokens else TOKENS
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "replays": REPLAYS, "ceilings": ceilings(), "shapes": {},
    }  # fmt: skip
    for name, (rows, columns) in SHAPES.items():
        figures = measure(rows, columns, tokens, result["ceilings"]["copy_gbs"])
        torch.cuda.empty_cache()
        result["shapes"][name] = {"rows": rows, "columns": columns, "figures": figures}
        for row in figures:
            print_row(f"{name}, {row['name']}", {key: value for key, value in row.items() if key != "name"})
    result["ceilings_after"] = ceilings()
    Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
