"""`python bench/measure_formats.py`: the loss of accuracy by 4 and 8 bit weights, measured on a CPU.

Weights are quantized and expanded again (`linear.reference`), and products are float32, so this is the error of the
format, not of a kernel. Matrices are generated in pieces of rows, so that gpt-oss-120b's LM head needs memory for only
one piece.
Weights and hidden states are normal, or heavy-tailed (Student's t with 3 degrees of freedom), with fixed seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common import output_file
from spark_mxfp4.kernels.check import PRODUCTS
from spark_mxfp4.kernels.linear import Format, reference

SHAPES = {name: PRODUCTS[name] for name in ("qkv", "o", "head")}
STATES = 256  # hidden states
PIECE = 8192  # rows of a matrix that are in memory at once: 94 MB in float32 with 2880 columns
SCALE = 0.02  # standard deviation of the weights, as in the initialisation of models
DEGREES = 3.0  # degrees of freedom of Student's t; its kurtosis is infinite
SEED, STATES_SEED = 1, 1_000_000  # seeds of the first piece of weights, and of the hidden states
Best = tuple[torch.Tensor, torch.Tensor]  # the five largest outputs of each hidden state, and their rows
Draw = Callable[[int, int, torch.Generator], torch.Tensor]


def normal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Return float32 [rows, columns] with variance 1."""
    return torch.randn(rows, columns, generator=generator)


def heavy(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Return float32 [rows, columns] from Student's t with DEGREES degrees of freedom, scaled to variance 1."""
    squares = sum(torch.randn(rows, columns, generator=generator).square_() for _ in range(int(DEGREES)))
    return torch.randn(rows, columns, generator=generator) * (DEGREES / squares).sqrt_() * (1 - 2 / DEGREES) ** 0.5


DRAWS: dict[str, Draw] = {"normal": normal, "heavy-tailed": heavy}


def pieces(rows: int, columns: int, draw: Draw) -> Iterator[torch.Tensor]:
    """Yield the bf16 matrix of a shape in pieces of at most PIECE rows; the same each time."""
    for number, begin in enumerate(range(0, rows, PIECE)):
        generator = torch.Generator().manual_seed(SEED + number)
        yield (SCALE * draw(min(PIECE, rows - begin), columns, generator)).bfloat16()


def measure(rows: int, columns: int, weights: Draw, count: int = STATES) -> list[dict[str, Any]]:
    """Return a row for each distribution of hidden states and each format.

    `weight_error` and `product_error` are root mean squares over all entries, relative to those of the bf16 weights and
    their float32 products. `top1` is the share of hidden states whose largest output stays the largest, `top1_in_5` the
    share where it stays among the five largest.
    """
    generators = {name: torch.Generator().manual_seed(STATES_SEED) for name in DRAWS}
    x = torch.cat([draw(count, columns, generators[name]).bfloat16().float() for name, draw in DRAWS.items()])
    kinds = {name: slice(number * count, (number + 1) * count) for number, name in enumerate(DRAWS)}
    weight_errors, products_off = dict.fromkeys(Format, 0.0), dict.fromkeys(Format, torch.zeros(len(x)))
    weight_norm, product_norm = 0.0, torch.zeros(len(x))
    best: dict[Format | None, Best] = {}
    first = 0
    for piece in pieces(rows, columns, weights):
        exact = piece.float()
        outputs = x @ exact.T
        weight_norm += float(exact.square().sum())
        product_norm += outputs.square().sum(1)
        best[None] = _larger(best.get(None), outputs, first)
        for format_ in Format:
            packed = reference(piece, format_)
            products = x @ packed.T
            weight_errors[format_] += float((packed - exact).square_().sum())
            products_off[format_] = products_off[format_] + (products - outputs).square_().sum(1)
            best[format_] = _larger(best.get(format_), products, first)
        first += len(piece)
    right = best[None][1][:, :1]
    return [
        {
            "states": name,
            "format": format_.name,
            "weight_error": (weight_errors[format_] / weight_norm) ** 0.5,
            "product_error": float((products_off[format_][rows_].sum() / product_norm[rows_].sum()).sqrt()),
            "top1": float((best[format_][1][rows_, :1] == right[rows_]).float().mean()),
            "top1_in_5": float((best[format_][1][rows_] == right[rows_]).any(1).float().mean()),
        }
        for name, rows_ in kinds.items()
        for format_ in Format
    ]


def _larger(best: Best | None, outputs: torch.Tensor, first: int) -> Best:
    """Return the five largest outputs of each state so far and their rows; `first` is the row of `outputs[:, 0]`."""
    values, indices = outputs.topk(min(5, outputs.shape[1]), dim=1)
    indices = indices + first
    if best is None:
        return values, indices
    values, indices = torch.cat([best[0], values], 1), torch.cat([best[1], indices], 1)
    values, order = values.topk(5, dim=1)
    return values, indices.gather(1, order)


def main() -> None:
    """Measure every shape and distribution, print and save JSON."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", required=True, type=output_file, help="JSON file for the figures")
    flags.add_argument("--states", type=int, default=STATES, help="hidden states; default %(default)s")
    flags.add_argument("--shapes", help=f"comma-separated, of {', '.join(SHAPES)}; default: all")
    arguments = flags.parse_args()
    names = arguments.shapes.split(",") if arguments.shapes else list(SHAPES)
    if unknown := [name for name in names if name not in SHAPES]:
        sys.exit(f"cannot measure {', '.join(unknown)} · choose from {', '.join(SHAPES)} · name some of these")
    result: dict[str, Any] = {"torch": torch.__version__, "states": arguments.states, "seed": SEED, "shapes": {}}
    for name in names:
        rows, columns = SHAPES[name]
        for weights, draw in DRAWS.items():
            figures = measure(rows, columns, draw, arguments.states)
            key = f"{name}, {weights} weights"
            result["shapes"][key] = {"rows": rows, "columns": columns, "figures": figures}
            for row in figures:
                errors = f"weights {row['weight_error']:.2%}, products {row['product_error']:.2%}"
                print(f"{key}, {row['states']} states: {row['format']:6} {errors}, top-1 {row['top1']:.1%}", flush=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
