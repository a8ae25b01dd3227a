"""`python bench/measure_small.py`: the kernel for few tokens within the limits of a GB10, on another GPU.

The kernels are those of compute capability 12.1, built for 9.0 (`python -m spark_mxfp4.kernels.precompile
90a-limited`): 48 blocks of at most 99 KB, one per multiprocessor, `mma.sync` only. The program checks every shape
against float32 on fresh inputs with poisoned memory. Then it times layers, and compares them with the same number of
blocks that only read or copy, with as many bytes in flight. The figures are saved after each part.

SPARK_PACE=234, set for both compilations and for this program, limits reads to 234 GB/s (pace.cuh), for the kernel and
for the blocks that only read. The difference between the two is then the kernel's own loss.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import LAYERS, count_of, figures, output_file
from spark_mxfp4.experts import GPT_OSS, SILU, ExpertWeights, TopK
from spark_mxfp4.kernels import hopper, precompile, tuning
from spark_mxfp4.kernels.check import (
    EDGES,
    MODELS,
    ROUTINGS,
    LayerSizes,
    error,
    poisoned,
    random_routing,
    random_weights,
    reference,
)
from spark_mxfp4.kernels.hopper import SMALL_LAYERS, LayerPlan, whole_layer
from spark_mxfp4.kernels.timing import graph_time

Routes = list[tuple[torch.Tensor, torch.Tensor]]
BLOCKS = 48  # multiprocessors of a GB10
PACE = os.environ.get("SPARK_PACE")
BF16 = 0.006
TOKENS = (1, 2, 4, 8, 16, 32)
ACTIVATIONS = {"gpt-oss": GPT_OSS, "silu": SILU}


def check(until: float) -> dict[str, Any]:
    """Compare every small shape with float32 until the time `until`; return the worst error and the wrong cases."""
    kernel = hopper.HopperKernel("hopper")
    worst, calls = 0.0, 0
    wrong: list[list[Any]] = []
    loads = [(t, kind) for t in (1, 2, 3, 8, 9, 17, 33, 64, 200) for kind in ROUTINGS]
    checked = [
        LayerPlan(shape, parts, at_once, blocks)
        for shape, settings in SMALL_LAYERS.items()
        for parts, at_once, blocks in ((1, (2, 2), BLOCKS), (3, (settings.stages, 1), BLOCKS), (2, (1, 1), 5))
    ]
    for number, (tokens, kind) in enumerate(loads):
        for experts, top_k, hidden, intermediate in (*EDGES, MODELS["gpt-oss-20b"]):
            if time.monotonic() > until:
                return {"worst_error": worst, "calls": calls, "wrong": wrong, "cut_short_at": [tokens, kind]}
            weights = random_weights(experts, hidden, intermediate, bias=number % 4 != 3)
            prepared = kernel.prepare(weights)
            x = torch.randn(tokens, hidden, device="cuda").bfloat16()
            ids, shares = random_routing(tokens, experts, top_k, kind)
            for name, activation in ACTIVATIONS.items():
                wanted = reference(x, weights, ids, shares, activation=activation)
                for plan in checked:
                    got, again = (
                        poisoned(whole_layer, x, prepared, TopK(ids, shares), plan, activation) for _ in range(2)
                    )
                    deviation, calls = error(got, wanted), calls + 1
                    worst = max(worst, deviation)
                    if not deviation < BF16 or not torch.equal(got, again):
                        wrong.append([tokens, kind, experts, hidden, intermediate, top_k, name, *plan, deviation])
                        sys.stdout.write(f"wrong: {wrong[-1]}\n")
        sys.stdout.write(f"checked {tokens} tokens, {kind}: {calls} calls, worst error {worst:.5f}\n")
        sys.stdout.flush()
    return {"worst_error": worst, "calls": calls, "wrong": wrong}


class Mover:
    """`copy_blocks.cu`: blocks that only read or copy."""

    def __init__(self, library: str) -> None:
        self.move = ctypes.CDLL(library).move_blocks
        self.move.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
        )  # fmt: skip
        self.source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
        self.target = torch.empty_like(self.source)

    def rate(self, piece: int, stages: int, *, copy: bool) -> float:
        """Return GB/s (of a copy, read and written) with `stages` times `piece` bytes of each block in flight."""
        total = self.source.numel() // piece * piece

        def once(_: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            to = self.target.data_ptr() if copy else None
            number = self.move(self.source.data_ptr(), to, total, piece, stages, BLOCKS, stream)
            if number:
                raise RuntimeError(f"the blocks could not be started · CUDA error {number} · see driver_types.h")

        us = graph_time(once, 2, 7)
        if copy and not torch.equal(self.source[:total], self.target[:total]):
            raise RuntimeError("the copy differs from its source")
        return float(round((1 + copy) * total / us / 1e3, 1))


def rates(library: str) -> dict[str, Any]:
    """Return read and copy rates for the pieces of each shape's stages."""
    mover = Mover(library)
    ours = {(shape.weight_bytes, n) for shape in SMALL_LAYERS.values() for n in range(1, shape.stages + 1)}
    pieces = sorted(ours | {(8192, 12), (16384, 6)})
    return {
        f"{piece}x{n}": {"read": mover.rate(piece, n, copy=False), "copy": mover.rate(piece, n, copy=True)}
        for piece, n in pieces
    }


def layers_of(model: LayerSizes) -> list[ExpertWeights]:
    """Return prepared layers to run in turn."""
    kernel = hopper.HopperKernel("hopper")
    return [kernel.prepare(random_weights(model.experts, model.hidden, model.intermediate)) for _ in range(LAYERS)]


def chosen(pairs: int, experts: int) -> LayerPlan:
    """Return the plan that 12.1 uses for `pairs` pairs."""
    return LayerPlan(**tuning.plan("NVIDIA GB10", pairs, experts), processors=BLOCKS)


def plans_of(tokens: int, *, many: bool) -> list[LayerPlan]:
    """Return other plans for a layer, by shape, parts and stages in flight; fewer if SPARK_PACE is set."""
    if PACE:
        return [LayerPlan(5, parts, at_once, BLOCKS) for parts in (1, 2, 3) for at_once in ((1, 1), (2, 1), (4, 4))]
    shapes = (4, 5, 6, 8, 9) if many else (4, 5, 6)
    plans: list[LayerPlan] = []
    for shape in shapes:
        most = SMALL_LAYERS[shape].stages
        at_once = {(1, 1), (2, 1), (2, 2), (most, 1), (most, 2), (most, most)}
        plans += [
            LayerPlan(shape, parts, pair, BLOCKS)
            for parts in ((1, 3) if tokens > 4 else (1, 2, 3, 5))
            for pair in sorted(at_once)
        ]
    return plans


def time_model(
    model: LayerSizes, tokens: tuple[int, ...], moved: dict[str, dict[str, float]], until: float
) -> list[dict[str, Any]]:
    """Time each plan for each number of tokens until the time `until`; the plan that 12.1 uses comes first.

    `moved` are the rates of blocks that only read and copy, by bytes in flight.
    """
    layers = layers_of(model)
    rows: list[dict[str, Any]] = []
    for number in tokens:
        x = torch.randn(number, model.hidden, device="cuda").bfloat16()
        routes = [random_routing(number, model.experts, model.top_k) for _ in range(LAYERS)]
        touched = sum(len(set(ids.flatten().tolist())) for ids, _ in routes) / LAYERS
        taken = chosen(number * model.top_k, model.experts)
        for plan in (taken, *plans_of(number, many=number * model.top_k > 4 * model.experts)):
            if time.monotonic() > until:
                return [*rows, {"cut_short_at": number}]

            def once(i: int, plan: LayerPlan = plan) -> torch.Tensor:
                return whole_layer(x, layers[i % LAYERS], TopK(*routes[i % LAYERS]), plan)  # noqa: B023

            row = figures(model, number, touched, graph_time(once, count_of(number), 9))
            same = moved.get(f"{SMALL_LAYERS[plan.shape].weight_bytes}x{plan.at_once[0]}", {})
            shares = {f"of_{way}": round(row["weights_gbs"] / rate, 3) for way, rate in same.items()}
            rows.append({**row, **shares, "plan": list(plan), "chosen": plan is taken})
        ours = [row for row in rows if row.get("tokens") == number]
        best = sorted(ours, key=lambda row: row["us"])[:4]
        fastest = [(row["plan"], row["us"], row["weights_gbs"]) for row in best]
        sys.stdout.write(f"{number} tokens: {ours[0]}, fastest {fastest}\n")
        sys.stdout.flush()
    return rows


def latency(plans: list[LayerPlan]) -> list[dict[str, Any]]:
    """Time one token with 1 to 16 experts, to extrapolate the latency for zero bytes; also time a tiny layer."""
    model = MODELS["gpt-oss-120b"]
    layers, rows = layers_of(model), []
    tiny = hopper.HopperKernel("hopper").prepare(random_weights(4, 64, 64))
    for plan in plans:
        points = []
        for top_k in (1, 2, 3, 4, 6, 8, 12, 16):
            x = torch.randn(1, model.hidden, device="cuda").bfloat16()
            routes = [random_routing(1, model.experts, top_k) for _ in range(LAYERS)]

            def once(i: int, x: torch.Tensor = x, routes: Routes = routes, plan: LayerPlan = plan) -> object:
                return whole_layer(x, layers[i % LAYERS], TopK(*routes[i % LAYERS]), plan)

            points.append((model.weight_bytes(top_k) / 1e3, graph_time(once, 40, 9)))
        mean_kb, mean_us = (sum(values) / len(points) for values in zip(*points, strict=True))
        slope = sum((kb - mean_kb) * (us - mean_us) for kb, us in points) / sum((kb - mean_kb) ** 2 for kb, _ in points)
        x = torch.randn(1, 64, device="cuda").bfloat16()
        ids, shares = random_routing(1, 4, 1)
        alone = graph_time(lambda _: whole_layer(x, tiny, TopK(ids, shares), plan), 40, 9)  # noqa: B023
        rows.append({
            "plan": list(plan), "us_by_kb": [[round(kb), round(us, 2)] for kb, us in points],
            "intercept_us": round(mean_us - slope * mean_kb, 2), "slope_gbs": round(1 / slope, 1),
            "tiny_layer_us": round(alone, 2),
        })  # fmt: skip
        sys.stdout.write(f"latency {rows[-1]}\n")
    return rows


def main() -> None:
    """Check, measure, and save JSON after each part."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", required=True, type=output_file, help="JSON file for the figures")
    flags.add_argument("--copy-library", required=True, help="copy_blocks.cu, compiled as a shared library")
    flags.add_argument("--commit", required=True, help="commit of these sources, saved with the results")
    flags.add_argument("--seconds", type=int, default=420, help="most time for all parts; default: 420")
    arguments = flags.parse_args()
    if not torch.cuda.is_available():
        sys.exit("cannot measure · torch sees no NVIDIA GPU · use a GPU machine and a torch that is built for CUDA")
    begin = time.monotonic()
    hopper.LIBRARIES[9, 0] = precompile.LAYER, precompile.LIMITED
    version = Path("/proc/driver/nvidia/version")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "commit": arguments.commit, "library": precompile.file_name(*hopper.LIBRARIES[9, 0]), "blocks": BLOCKS,
        "pace_gbs": PACE,
        "driver": version.read_text(encoding="utf-8").splitlines()[0] if version.exists() else "", "failed": {},
    }  # fmt: skip
    small = LayerPlan(5, 3, (4, 1), BLOCKS)
    parts: dict[str, Callable[[float], Any]] = {
        "rates": lambda _: rates(arguments.copy_library),
        "check": check,
        "gpt-oss-120b": lambda until: time_model(MODELS["gpt-oss-120b"], TOKENS, result.get("rates", {}), until),
        "latency": lambda _: latency([chosen(4, 128), small, LayerPlan(4, 3, (3, 1), BLOCKS), small._replace(shape=6)]),
        "16 experts": lambda until: time_model(
            MODELS["16 experts, top-2"], (64, 128, 256), result.get("rates", {}), until
        ),
    }
    ends = {"check": 0.4, "gpt-oss-120b": 0.85, "16 experts": 1.0}
    for name, part in parts.items():
        try:
            result[name] = part(begin + arguments.seconds * ends.get(name, 1))
        except Exception as failure:  # noqa: BLE001 - the other parts must still be saved
            result["failed"][name] = f"{type(failure).__name__}: {failure}"
            sys.stdout.write(f"{name} failed · {result['failed'][name]}\n")
        result[f"{name}_ends_at_s"] = round(time.monotonic() - begin)
        torch.cuda.empty_cache()
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({key: result.get(key) for key in ("check", "rates", "failed")}) + "\n")


if __name__ == "__main__":
    main()
