"""Count how often MAX's attention adds an attention sink on a CPU: a graph with one operation, without our code.

`python sinks.py` in an environment with MAX prints a line of JSON for each number of keys. All scores are zero and all
values one, so attention over n keys with a sink s gives n / (n + c · e^s), from which c follows. It should be 1. With
MAX 26.7.0 c is the number of blocks of 128 keys, because `_online_softmax` adds the sink once for each block.
"""

from __future__ import annotations

import json
import math

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from max.nn.attention import MHAMaskVariant
from max.nn.kernels import flash_attention_ragged
from max.nn.kv_cache import MHAKVCacheParams, PagedCacheValues

PAGE, PAGES, HEADS, DIM = 128, 4, 1, 64
SINK = 3.0
KEYS = (1, 127, 128, 129, 256, 257, 384)
DEVICE = DeviceRef.CPU()


def attention() -> Model:
    parameters = MHAKVCacheParams(
        dtype=DType.float32, head_dim=DIM, num_layers=1, devices=[DEVICE], page_size=PAGE, n_kv_heads=HEADS
    )
    number = TensorType(DType.uint32, [1], DEVICE)
    types = (
        TensorType(DType.float32, ["tokens", HEADS, DIM], DEVICE), TensorType(DType.float32, [HEADS], DEVICE),
        TensorType(DType.uint32, ["offsets"], DEVICE),
        BufferType(DType.float32, [PAGES, 2, 1, PAGE, HEADS, DIM], DEVICE), TensorType(DType.int64, [1], DEVICE),
        TensorType(DType.uint32, ["batch"], DEVICE),
        TensorType(DType.uint32, ["batch", "pages"], DEVICE), number, number, TensorType(DType.int64, [4], DEVICE),
    )  # fmt: skip
    with Graph("sinks", input_types=types) as graph:
        q, sinks, offsets, blocks, stride, cached, table, longest_prompt, longest_cache, dispatch = graph.inputs
        cache = PagedCacheValues(
            kv_blocks=blocks.buffer, page_stride=stride.tensor, cache_lengths=cached.tensor, lookup_table=table.tensor,
            max_prompt_length=longest_prompt.tensor, max_cache_length=longest_cache.tensor,
            attention_dispatch_metadata=dispatch.tensor,
        )  # fmt: skip
        result = flash_attention_ragged(
            parameters, input=q.tensor, input_row_offsets=offsets.tensor, kv_collection=cache,
            layer_idx=ops.constant(0, DType.uint32, device=DEVICE), mask_variant=MHAMaskVariant.CAUSAL_MASK, scale=1.0,
            sink_weights=sinks.tensor,
        )  # fmt: skip
        graph.output(result)
    return InferenceSession(devices=[CPU()]).load(graph)


def counted(model: Model, keys: int) -> float:
    """Return how often the sink is counted by a query that sees `keys` keys."""
    blocks = np.zeros((PAGES, 2, 1, PAGE, HEADS, DIM), np.float32)
    blocks[:, 1] = 1
    numbers = [np.array([number], np.uint32) for number in (keys - 1, 1, keys)]
    inputs = (
        np.zeros((1, HEADS, DIM), np.float32), np.full(HEADS, SINK, np.float32), np.array([0, 1], np.uint32), blocks,
        np.array([blocks[0].size], np.int64), numbers[0], np.arange(PAGES, dtype=np.uint32)[None], *numbers[1:],
        np.array([1, 1, 1, keys], np.int64),
    )  # fmt: skip
    (result,) = model.execute(*(Buffer.from_numpy(array) for array in inputs))
    value = float(result.to_numpy()[0, 0, 0])
    return (keys / value - keys) / math.exp(SINK)


def main() -> None:
    model = attention()
    for keys in KEYS:
        print(json.dumps({"keys": keys, "counted": round(counted(model, keys), 4)}), flush=True)


if __name__ == "__main__":
    main()
