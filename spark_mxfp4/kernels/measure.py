"""`python -m spark_mxfp4.kernels.measure`: how fast the kernels are on this GPU, against its ceilings and a peer.

Every time is the median of CUDA graph replays; a graph runs several layers in turn, so that no weight is in cache.
The peer is OpenAI's triton_kernels, as vLLM ships it (vllm/third_party/triton_kernels): `--peer FOLDER` that holds it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from spark_mxfp4.experts import ExpertWeights
from spark_mxfp4.kernels import gpu, hopper, tuning
from spark_mxfp4.kernels.check import error, random_routing, random_weights, reference

LAYERS, REPLAYS = 4, 15
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BITS = 4.25


class Model(NamedTuple):
    """The sizes of one layer."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def weight_bytes(self, hit: float) -> float:
        """Return the bytes of `hit` experts' weights and scales."""
        return hit * 3 * self.hidden * self.intermediate * BITS / 8

    def operations(self, tokens: int) -> float:
        """Return the floating-point operations of both products for `tokens`."""
        return 6.0 * tokens * self.top_k * self.hidden * self.intermediate


MODELS = {
    "gpt-oss-120b": Model(128, 4, 2880, 2880),
    "gpt-oss-20b": Model(32, 4, 2880, 2880),
    "64 experts, top-8": Model(64, 8, 4096, 1536),
}
Layer = Callable[[int], object]


def graph_time(once: Layer, count: int) -> float:
    """Return the median time of `once(i)` in µs, for i below `count` in one CUDA graph, replayed."""
    once(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            once(i)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times)) * 1e3 / count


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


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


def figures(model: Model, tokens: int, hit: float, us: float) -> dict[str, float]:
    """Return a measurement as weights in GB/s and products in TFLOP/s."""
    return {
        "tokens": tokens, "experts_hit": hit, "us": round(us, 2),
        "weights_gbs": round(model.weight_bytes(hit) / us / 1e3),
        "tflops": round(model.operations(tokens) / us / 1e6, 1),
    }  # fmt: skip


def count_of(tokens: int) -> int:
    """Return how many layers one graph runs: enough to hide its launch."""
    return 5 * LAYERS if tokens <= 256 else 2 * LAYERS


def measure_ours(model: Model, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """Check and time our layer for each number of tokens."""
    plain = random_weights(model.experts, model.hidden, model.intermediate)
    layers = [gpu.prepare(random_weights(model.experts, model.hidden, model.intermediate)) for _ in range(LAYERS - 1)]
    layers.append(gpu.prepare(plain))
    rows = []
    for number in tokens:
        x = torch.randn(number, model.hidden, device="cuda").bfloat16()
        routes = [random_routing(number, model.experts, model.top_k) for _ in range(LAYERS)]
        hit = statistics.mean(len(set(ids.flatten().tolist())) for ids, _ in routes)
        off = error(gpu.moe(x, layers[-1], *routes[-1]), reference(x, plain, *routes[-1]))
        us = graph_time(_running(x, layers, routes), count_of(number))
        rows.append({**figures(model, number, hit, us), "error": off})
        _say("ours", rows[-1])
    return rows


def _running(x: torch.Tensor, layers: list[ExpertWeights], routes: list[tuple[torch.Tensor, torch.Tensor]]) -> Layer:
    return lambda i: gpu.moe(x, layers[i % LAYERS], *routes[i % LAYERS])


def tune(model: Model, tokens: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Time the layer with each pair of equally wide Hopper shapes; the fastest of them belong into tuned.json."""
    weights = random_weights(model.experts, model.hidden, model.intermediate)
    layers = [hopper.prepare(weights) for _ in range(LAYERS)]
    found: dict[int, dict[str, float]] = {}
    numbers = range(hopper.library().spark_shape_number())
    for number in tokens:
        x = torch.randn(number, model.hidden, device="cuda").bfloat16()
        routes = [random_routing(number, model.experts, model.top_k) for _ in range(LAYERS)]
        share = number * model.top_k / model.experts
        fitting = [n for n in numbers if share / 2.5 <= hopper.tile_tokens(n) <= max(64, 8 * share)]
        found[number] = {}
        for pair in [(a, b) for a in fitting for b in fitting if share < 1 or a == b]:
            tuning.shapes = lambda *_, pair=pair: pair
            us = graph_time(_running(x, layers, routes), count_of(number))
            found[number][f"{pair[0]},{pair[1]}"] = round(us, 1)
        best = sorted(found[number].items(), key=lambda item: item[1])
        _say("tune", {"tokens": number, **dict(best[:6])})
    return found


def main() -> None:
    """Measure what the flags ask for and save JSON."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", required=True, help="JSON file for the figures")
    flags.add_argument("--peer", help="folder that holds triton_kernels")
    flags.add_argument("--tune", action="store_true", help="time every pair of shapes instead")
    flags.add_argument("--tokens", help="with commas; default: 1 to 8192")
    given = flags.parse_args()
    if not torch.cuda.is_available():
        sys.exit("cannot measure · torch sees no NVIDIA GPU · use a GPU machine and a torch that is built for CUDA")
    tokens = tuple(map(int, given.tokens.split(","))) if given.tokens else TOKENS
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "layers_in_turn": LAYERS, "replays": REPLAYS, "ceilings": ceilings(),
    }  # fmt: skip
    _say("ceilings", result["ceilings"])
    if given.tune:
        result["tune"] = tune(MODELS["gpt-oss-120b"], tokens)
    else:
        result["models"] = {
            name: {**model._asdict(), "ours": measure_ours(model, tokens)} for name, model in MODELS.items()
        }
        if given.peer:
            sys.path.insert(0, given.peer)
            from spark_mxfp4.kernels import peer  # noqa: PLC0415 (its packages come from the folder)

            for name in ("gpt-oss-120b",):
                result["models"][name]["peer"] = peer.measure(MODELS[name], tokens)
    result["ceilings_after"] = ceilings()
    Path(given.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _say(what: str, row: dict[str, Any]) -> None:
    sys.stdout.write(f"{what}: " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
