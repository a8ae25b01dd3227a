"""`python bench/measure_shards.py`: gpt-oss-120b's experts on two GPUs of one host, against one GPU.

`tensor` halves each expert, `expert` halves the number of experts. Both GPUs compute their shard of a layer and NCCL
adds the results; `products_us` is the time without that sum. A time is the slower GPU's median of CUDA graph replays,
with several layers in turn, as in `measure_experts`. NVLink's multicast stays off, because it uses resources of
switches that other guests of the host share.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from common import LAYERS, count_of, output_file, print_row, token_counts
from spark_mxfp4.experts import ExpertWeights, Projection
from spark_mxfp4.kernels.check import MODELS, error, random_routing, random_weights, reference
from spark_mxfp4.kernels.gpu import GpuKernel
from spark_mxfp4.kernels.timing import REPLAYS, Layer, graph_time

GPUS, DEVICE = 2, "cuda"
ONE, SPLITS = "one", ("tensor", "expert")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
MODEL = MODELS["gpt-oss-120b"]
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

Rows = dict[str, list[dict[str, float]]]


def shard(weights: ExpertWeights, split: str, rank: int) -> tuple[ExpertWeights, torch.Tensor | None]:
    """Return GPU `rank`'s shard of `weights`, split as by vLLM's loader, and its expert map, int32 [E].

    For `tensor` the shard is half of each expert, without a map; for `expert` half of the experts; else all weights.
    The sum of the shards' outputs is the layer's output.
    """
    gate_up, down = weights
    if split == "tensor":
        bias = down.bias
        if bias is not None and rank > 0:  # only one GPU adds the bias
            bias = torch.zeros_like(bias)
        first = Projection(*(_half(tensor, 1, rank) for tensor in gate_up))
        return ExpertWeights(first, Projection(_half(down.weight, 2, rank), _half(down.scales, 2, rank), bias)), None
    if split == "expert":
        numbers = torch.arange(down.weight.shape[0], dtype=torch.int32, device=down.weight.device)
        own = _half(numbers, 0, rank)
        expert_map = torch.full_like(numbers, -1)
        expert_map[own] = numbers[: len(own)]
        return ExpertWeights(*(Projection(*(_half(tensor, 0, rank) for tensor in p)) for p in weights)), expert_map
    return weights, None


def _half(tensor: torch.Tensor | None, axis: int, rank: int) -> Any:
    return None if tensor is None else tensor.chunk(GPUS, axis)[rank].contiguous()


def measure_rank(rank: int, rendezvous: str, tokens: tuple[int, ...], output: str) -> None:
    """Measure as GPU `rank`. The processes meet through the file `rendezvous`, and rank 0 saves JSON as `output`."""
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=GPUS, device_id=torch.device("cuda", rank)
    )
    rows: Rows = {}
    for split in (ONE, *SPLITS):
        rows[split] = _measure(split, rank, tokens)
        if rank == 0:
            result = {**_facts(), "rows": _compared(rows)}
            Path(output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    distributed.destroy_process_group()


def _measure(split: str, rank: int, tokens: tuple[int, ...]) -> list[dict[str, float]]:
    """Return a row for each number of tokens: this GPU's products, and the layer with NCCL's sum and its error."""
    torch.manual_seed(0)  # both GPUs have the same weights, tokens and routings
    kernel, plain = GpuKernel(), random_weights(MODEL.experts, MODEL.hidden, MODEL.intermediate, DEVICE)
    own, expert_map = shard(plain, split, rank)
    layers = [kernel.prepare(own) for _ in range(LAYERS)]
    rows = []
    for number in tokens:
        x = torch.randn(number, MODEL.hidden, device=DEVICE).bfloat16()
        routes = [random_routing(number, MODEL.experts, MODEL.top_k, device=DEVICE) for _ in range(LAYERS)]

        def products(i: int, x: torch.Tensor = x, routes: Any = routes) -> torch.Tensor:
            """Compute this GPU's shard of a layer."""
            return kernel.run(x, layers[i % LAYERS], *routes[i % LAYERS], expert_map)

        def summed(i: int, products: Any = products) -> torch.Tensor:
            """Compute the layer: the sum of both GPUs' shards."""
            out: torch.Tensor = products(i)
            distributed.all_reduce(out)
            return out

        row: dict[str, float] = {"tokens": number, "products_us": _time(products, number)}
        if split != ONE:
            row |= {"us": _time(summed, number), "error": error(summed(0), reference(x, plain, *routes[0]))}
        rows.append(row)
        if rank == 0:
            print_row(split, row)
    return rows


def _time(once: Layer, tokens: int) -> float:
    """Return the slower GPU's median time of `once(i)` in µs; both GPUs call this at the same time."""
    slower = torch.tensor(graph_time(once, count_of(tokens), before=distributed.barrier), device=DEVICE)
    distributed.all_reduce(slower, distributed.ReduceOp.MAX)
    return float(slower)


def _compared(rows: Rows) -> Rows:
    """Return `rows`; add the speed-up over one GPU to the rows of two GPUs."""
    alone = {row["tokens"]: row["products_us"] for row in rows[ONE]}
    return {
        split: [row if split == ONE else {**row, "speedup": alone[row["tokens"]] / row["us"]} for row in measured]
        for split, measured in rows.items()
    }


def _facts() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(), "gpus": GPUS, "torch": torch.__version__, "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())), "layers_in_turn": LAYERS, "replays": REPLAYS,
        "model": MODEL._asdict(),
    }  # fmt: skip


def main() -> None:
    """Measure on the first two GPUs and save JSON."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", required=True, type=output_file, help="JSON file for the figures")
    flags.add_argument("--tokens", type=token_counts, default=TOKENS, help="comma-separated; default: 1 to 4096")
    arguments = flags.parse_args()
    if torch.cuda.device_count() < GPUS:
        sys.exit(
            f"cannot measure · torch sees {torch.cuda.device_count()} NVIDIA GPUs, and this takes {GPUS} of one host · "
            "for one, run bench/measure_experts.py --output FILE"
        )
    os.environ.update(NO_MULTICAST)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            measure_rank, (f"{folder}/rendezvous", arguments.tokens, str(arguments.output)), nprocs=GPUS
        )


if __name__ == "__main__":
    main()
