"""`python bench/measure_attention.py`: attention of decoding steps, compared with vLLM and FlashAttention 3.

Each row is one layer of gpt-oss-120b (64 query heads, 8 key heads of 64, sinks) with a number of sequences of one
length: ours in one launch, and vLLM's rotary embedding, cache update and attention, which take five launches. Each
layer has its own KV cache, so that none is in the GPU's cache. Results are compared with float32 first. Needs vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import _custom_ops as ops
from vllm.vllm_flash_attn import flash_attn_varlen_func

from common import output_file
from spark_mxfp4.kernels import attention
from spark_mxfp4.kernels.attention import LEAST_STEPS, WIDTH, Cache, Layer, Projections
from spark_mxfp4.kernels.timing import graph_time

QUERY_HEADS, KEY_HEADS, BLOCK, SCALE = 64, 8, 16, 0.125
CASES = (
    (1, 256),
    (1, 1100),
    (1, 8192),
    (1, 65_536),
    (4, 1100),
    (4, 8192),
    (16, 1100),
    (16, 8192),
    (64, 1100),
    (64, 4096),
)
WINDOWS = (128, 0)
CACHED_BYTES = 400 << 20  # least bytes of all layers of a case: many times a GPU's cache
MOST_LAYERS = 36
SPLITS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph
MOST_ERROR = 0.01


def random_layer(tokens: int, length: int) -> tuple[Projections, Cache]:
    """Return random projections of `tokens` new tokens and their sequences of `length`, the new token among them."""
    width = -(-length // BLOCK)
    blocks = tokens * width
    data = torch.randn(blocks, KEY_HEADS, BLOCK, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(blocks, device="cuda").int().reshape(tokens, width)
    slots = table[:, -1].long() * BLOCK + (length - 1) % BLOCK
    product = torch.randn(tokens, WIDTH * (QUERY_HEADS + 2 * KEY_HEADS), device="cuda").bfloat16()
    parts = product.split([WIDTH * QUERY_HEADS, *[WIDTH * KEY_HEADS] * 2], dim=-1)
    lengths = torch.full((tokens,), length, dtype=torch.int32, device="cuda")
    return Projections(*(part.view(tokens, -1, WIDTH) for part in parts)), Cache(data, table, lengths, slots)


class FlashAttention:
    """`attention.attend` computed by vLLM's own operators, called as in its FlashAttention backend."""

    def __init__(self, tokens: int, length: int, layer: Layer) -> None:
        self.one = torch.ones(1, device="cuda")
        self.positions = torch.full((tokens,), length - 1, device="cuda")
        assert layer.rotation is not None  # noqa: S101 (for mypy)
        self.rotation = layer.rotation.bfloat16()
        window = [layer.window - 1, 0] if layer.window else [-1, -1]
        self.options = {
            "cu_seqlens_q": torch.arange(tokens + 1, dtype=torch.int32, device="cuda"), "max_seqlen_q": 1,
            "max_seqlen_k": length, "window_size": window, "s_aux": layer.sinks,
            "softmax_scale": SCALE, "causal": True, "num_splits": SPLITS, "fa_version": 3,
        }  # fmt: skip

    def __call__(self, new: Projections, cache: Cache, output: torch.Tensor) -> None:
        """Rotate, update the cache, and attend."""
        query, key, value = new
        keys, values = cache.data.transpose(1, 2).split(WIDTH, dim=-1)
        ops.rotary_embedding(self.positions, query, key, WIDTH, self.rotation, True)
        ops.reshape_and_cache_flash(key, value, keys, values, cache.slots, "auto", self.one, self.one)
        flash_attn_varlen_func(
            q=query, k=keys, v=values, out=output, seqused_k=cache.lengths, block_table=cache.table, **self.options
        )


def measure(tokens: int, length: int, window: int, variants: list[tuple[int, int]]) -> dict[str, Any]:
    """Return one row: µs a layer for ours and vLLM's, and the worst error against float32."""
    bytes_of_layer = tokens * min(length, window or length) * KEY_HEADS * 2 * WIDTH * 2
    count = max(2, min(MOST_LAYERS, CACHED_BYTES // bytes_of_layer))
    layers = [random_layer(tokens, length) for _ in range(count)]
    angles = torch.rand(length, WIDTH // 2, device="cuda") * 2 * torch.pi
    layer = Layer(
        SCALE,
        attention.counters(KEY_HEADS, torch.device("cuda")),
        window,
        torch.randn(QUERY_HEADS, device="cuda").bfloat16(),
        torch.cat([angles.cos(), angles.sin()], dim=-1),
    )
    output = torch.full((tokens, QUERY_HEADS, WIDTH), torch.nan, device="cuda", dtype=torch.bfloat16)
    expected = attention.reference(*layers[0], layer)

    def ours(number: int, *, shared_by: int = 0, least: int = LEAST_STEPS) -> None:
        attention.attend(*layers[number], layer, output, shared_by=shared_by, least=least)

    ours(0)
    error = float((output.float() - expected).abs().max())
    row: dict[str, Any] = {"sequences": tokens, "length": length, "window": window, "error": error}
    row["splits"] = {
        f"{shared}/{least}": graph_time(partial(ours, shared_by=shared, least=least), len(layers))
        for shared, least in variants
    }
    row["us"] = graph_time(ours, len(layers))  # after the variants, when the clocks have risen
    row["gbs"] = bytes_of_layer / row["us"] / 1e3
    peer = FlashAttention(tokens, length, layer)
    row["vllm_us"] = graph_time(lambda number: peer(*layers[number], output), len(layers))
    row["faster"] = row["vllm_us"] / row["us"]
    return row


def main() -> int:
    """Measure every case, save after each, and return 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("attention.json"))
    parser.add_argument("--commit", default="", help="commit of these sources, saved with the results")
    options = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "vllm": vllm.__version__}
    result: dict[str, Any] = {"machine": machine, "commit": options.commit, "rows": []}
    path = output_file(options.output)
    for tokens, length in CASES:
        for window in WINDOWS:
            variants = [(s, least) for s in (1, 2, 4, 8, 16, 32) for least in (8, 16, 64) if window == 0]
            variants = [v for v in variants if v[0] * tokens * KEY_HEADS <= 1024]
            row = measure(tokens, length, window, variants)
            result["rows"].append(row)
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print({key: value for key, value in row.items() if key != "splits"}, flush=True)
    return int(any(not row["error"] < MOST_ERROR * 4 for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
