"""`python bench/measure_experts.py`: the speed of the kernels on this GPU, compared with its ceilings and two peers.

Every time is the median of CUDA graph replays; a graph runs several layers in turn, so that no weight is in cache.
The first peer is OpenAI's triton_kernels, as vLLM ships it (vllm/third_party/triton_kernels); `--peer FOLDER` is its
parent folder. The second peer is FlashInfer's CUTLASS kernel (`--peer-cutlass`); FlashInfer must be installed. The
figures are saved after each model. If a peer fails, its error is saved instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton

from common import LAYERS, ceilings, count_of, figures, output_file, print_row, token_counts
from spark_mxfp4.experts import GPT_OSS, SILU, Activation, ExpertWeights, TopK
from spark_mxfp4.kernels import hopper
from spark_mxfp4.kernels.check import (
    MODELS,
    OTHERS,
    ROUTINGS,
    LayerSizes,
    error,
    random_routing,
    random_weights,
    reference,
)
from spark_mxfp4.kernels.gpu import GpuKernel
from spark_mxfp4.kernels.timing import REPLAYS, Layer, graph_time

MOST_SHARE = 4.0  # `tune` times the kernel of a whole layer up to this many tokens per expert
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

PeerArguments = tuple[LayerSizes, tuple[int, ...], Activation, str]  # the last: a kind of `random_routing`
Peer = Callable[[LayerSizes, tuple[int, ...], Activation, str], list[dict[str, Any]]]


def measure_ours(
    model: LayerSizes, tokens: tuple[int, ...], activation: Activation, routing: str
) -> list[dict[str, Any]]:
    """Check and time our layer for each number of tokens."""
    kernel = GpuKernel()

    def weights() -> ExpertWeights:
        """Return random weights; only gpt-oss has biases."""
        return random_weights(model.experts, model.hidden, model.intermediate, bias=activation == GPT_OSS)

    plain = weights()
    layers = [*(kernel.prepare(weights()) for _ in range(LAYERS - 1)), kernel.prepare(plain)]
    kernel.tune(layers[-1])
    rows = []
    for number in tokens:
        x = torch.randn(number, model.hidden, device="cuda").bfloat16()
        routes = [random_routing(number, model.experts, model.top_k, routing) for _ in range(LAYERS)]
        touched = statistics.mean(len(set(ids.flatten().tolist())) for ids, _ in routes)
        computed = kernel.run(x, layers[-1], *routes[-1], activation=activation)
        deviation = error(computed, reference(x, plain, *routes[-1], activation=activation))
        us = graph_time(_running(kernel, x, layers, routes, activation), count_of(number))
        rows.append({**figures(model, number, touched, us), "error": deviation})
        print_row("ours", rows[-1])
    return rows


def _running(
    kernel: GpuKernel,
    x: torch.Tensor,
    layers: list[ExpertWeights],
    routes: list[tuple[torch.Tensor, torch.Tensor]],
    activation: Activation,
) -> Layer:
    return lambda i: kernel.run(x, layers[i % LAYERS], *routes[i % LAYERS], activation=activation)


def tune(model: LayerSizes, tokens: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Time each way to compute the layer; the fastest belong in tuned.json.

    The ways are the pairs of equally wide Hopper shapes that suit the load, and the plans of `hopper.whole_layer`.
    """
    weights = random_weights(model.experts, model.hidden, model.intermediate)
    kernel = hopper.HopperKernel("hopper")
    layers = [kernel.prepare(weights) for _ in range(LAYERS)]
    times: dict[int, dict[str, float]] = {}
    plans = [hopper.LayerPlan(rows, parts) for rows in (1, 2, 3) for parts in (1, 2, 3)]
    for number in tokens:
        x = torch.randn(number, model.hidden, device="cuda").bfloat16()
        routes = [random_routing(number, model.experts, model.top_k) for _ in range(LAYERS)]
        share = number * model.top_k / model.experts
        fitting = [n for n, shape in hopper.GROUPED.items() if share / 2.5 <= shape.tokens <= max(64, 8 * share)]
        ways: dict[str, Layer] = {
            **{f"{n},{n}": _way(hopper.grouped_layer, x, layers, routes, (n, n)) for n in fitting},
            **{f"{plan}": _way(hopper.whole_layer, x, layers, routes, plan) for plan in plans if share <= MOST_SHARE},
        }
        times[number] = {name: round(graph_time(way, count_of(number)), 1) for name, way in ways.items()}
        best = sorted(times[number].items(), key=lambda item: item[1])
        print_row("tune", {"tokens": number, **dict(best[:6])})
    return times


def _way(
    call: Callable[..., torch.Tensor],
    x: torch.Tensor,
    layers: list[ExpertWeights],
    routes: list[tuple[torch.Tensor, torch.Tensor]],
    choice: object,
) -> Layer:
    return lambda i: call(x, layers[i % LAYERS], TopK(*routes[i % LAYERS]), choice)


def triton_peer(folder: str) -> Peer:
    """Return the measurement of triton_kernels in `folder`. Raises ImportError if it is not there."""
    sys.path.insert(0, folder)
    import peer_triton  # noqa: PLC0415 (its packages come from the folder)

    return peer_triton.measure


def cutlass_peer() -> Peer:
    """Return the measurement of FlashInfer's CUTLASS kernel. Raises ImportError if FlashInfer is not installed."""
    import peer_cutlass  # noqa: PLC0415 (only this peer needs FlashInfer)

    return peer_cutlass.measure


def measure_peer(name: str, load: Callable[[], Peer], model: str, arguments: PeerArguments) -> dict[str, Any]:
    """Return a peer's rows for `model` under the key `name`, or its error under `name`_failed."""
    torch.cuda.empty_cache()
    try:
        return {name: load()(*arguments)}
    except Exception as failure:  # noqa: BLE001 - a peer may raise anything; our figures must still be saved
        why = f"{type(failure).__name__}: {failure}"
        sys.stdout.write(f"{name} failed for {model} · {why}\n")
        return {f"{name}_failed": why}


def peers(arguments: argparse.Namespace) -> dict[str, Callable[[], Peer]]:
    """Return the peers selected by the command line, each as a function that loads it."""
    wanted: dict[str, Callable[[], Peer]] = {}
    if arguments.peer:
        wanted["peer"] = lambda: triton_peer(arguments.peer)
    if arguments.peer_cutlass:
        wanted["peer_cutlass"] = cutlass_peer
    return wanted


def chosen_models(known: dict[str, LayerSizes], experts: str) -> dict[str, LayerSizes]:
    """Return the `known` models with these numbers of experts, separated by commas; all for an empty string.

    Raises ValueError for a number that no model has.
    """
    numbers = set(map(int, experts.split(","))) if experts else {model.experts for model in known.values()}
    if unknown := numbers - {model.experts for model in known.values()}:
        have = ", ".join(str(model.experts) for model in known.values())
        raise ValueError(f"no model has {min(unknown)} experts · they have {have} · name some of these")
    return {name: model for name, model in known.items() if model.experts in numbers}


def main() -> None:
    """Make the selected measurements and save JSON."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", required=True, type=output_file, help="JSON file for the figures")
    flags.add_argument("--peer", help="folder that holds triton_kernels")
    flags.add_argument("--peer-cutlass", action="store_true", help="time FlashInfer's CUTLASS kernel too")
    flags.add_argument("--tune", action="store_true", help="time every pair of shapes instead")
    flags.add_argument("--tokens", type=token_counts, default=TOKENS, help="comma-separated; default: 1 to 8192")
    flags.add_argument(
        "--experts", default="", help="only models with these numbers of experts, separated by commas; default: all"
    )
    flags.add_argument("--routing", choices=ROUTINGS, default="even", help="one: every token to the same experts")
    flags.add_argument("--silu", action="store_true", help="layers of other families: plain SiLU, no biases")
    arguments = flags.parse_args()
    activation, known = (SILU, OTHERS) if arguments.silu else (GPT_OSS, MODELS)
    try:
        models = chosen_models(known, arguments.experts)
    except ValueError as error:
        sys.exit(str(error))
    if not torch.cuda.is_available():
        sys.exit("cannot measure · torch sees no NVIDIA GPU · use a GPU machine and a torch that is built for CUDA")
    tokens = arguments.tokens
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "routing": arguments.routing, "layers_in_turn": LAYERS, "replays": REPLAYS,
        "ceilings": ceilings(),
    }  # fmt: skip

    def save() -> None:
        """Write the figures so far."""
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    print_row("ceilings", result["ceilings"])
    if arguments.tune:
        result["tune"] = {name: tune(model, tokens) for name, model in models.items()}
    else:
        rows = result["models"] = {name: model._asdict() for name, model in models.items()}
        for name, model in models.items():
            print_row(name, model._asdict())
            rows[name]["ours"] = measure_ours(model, tokens, activation, arguments.routing)
            save()
        for title, load in peers(arguments).items():
            for name, model in models.items():
                rows[name] |= measure_peer(title, load, name, (model, tokens, activation, arguments.routing))
                save()
    result["ceilings_after"] = ceilings()
    save()


if __name__ == "__main__":
    main()
