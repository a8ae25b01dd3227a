"""Attention for decoding in one launch: rotary embedding, KV cache update, and softmax with sinks.

The kernels are in attention.cuh. They support one new token per sequence, heads of 64 dimensions, up to eight query
heads per key head, a paged bf16 cache, and compute capabilities 9.0 and 12.x. Sums are float32. Probabilities are
rounded to bfloat16 before they are multiplied by the values, as in FlashAttention.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from spark_mxfp4.kernels import extension, precompile

GROUP, WIDTH, ROWS = 8, 64, 16  # attention.cuh
WARPS, FEW_WARPS = 16, 8  # per block; the smaller number if eight warps cover the window in one step
PART = GROUP * (WIDTH + 2)  # attention.cuh: floats of a split's partial result
MOST_TOKENS = 256  # sequences of a step; FlashAttention runs larger steps
MOST_SPLITS, LEAST_STEPS = 32, 16  # splits of a sequence; steps of 16 tokens per split
VECTOR = 8  # elements of bf16 that a thread loads at once, from addresses that are multiples of 16
POINTER = ctypes.c_void_p
FUNCTIONS = {
    "spark_attention": (POINTER, ctypes.c_int, POINTER),
    "spark_rotation": (POINTER, POINTER),
    "spark_norm": (POINTER, POINTER),
}


class Projections(NamedTuple):
    """Projections of the new tokens, bf16: query [T, query heads, 64], key and value [T, key heads, 64].

    The heads of a token are contiguous; the stride of tokens is any multiple of 8.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Cache(NamedTuple):
    """The paged KV cache of one layer.

    The last dimension of `data` is contiguous, a key and then a value; the other strides are any multiples of 8.
    """

    data: torch.Tensor  # bf16 [blocks, key heads, block size, 128]
    table: torch.Tensor  # int32 [sequences, columns]: the blocks of each sequence
    lengths: torch.Tensor  # int32 [sequences]: tokens including the new ones; 0 for padding
    slots: torch.Tensor  # int64 [tokens]: block · block size + position in the block; negative: do not store

    def strides(self) -> tuple[int, int, int]:
        """Return the strides of blocks, heads and tokens, in elements."""
        block, head, token, _ = self.data.stride()
        return block, head, token


Attention = extension.structure("Attention")
Rotation = extension.structure("Rotation")


def heads_fit(query_heads: int, key_heads: int, width: int) -> bool:
    """Tell whether the kernels support these numbers of heads, each with `width` dimensions."""
    return width == WIDTH and 0 < query_heads <= GROUP * key_heads and query_heads % key_heads == 0


def device_fits(device: torch.device) -> bool:
    """Tell whether the kernels are compiled for `device`."""
    return extension.target(device) is not None


def splits(tokens: int, key_heads: int, window: int, processors: int) -> int:
    """Return how many thread blocks share a sequence and key head.

    The blocks fill `processors` multiprocessors. The most is MOST_SPLITS, or one per ROWS · WARPS tokens of a window.
    """
    most = -(-window // (ROWS * WARPS)) if window else MOST_SPLITS
    return max(1, min(most, processors // (tokens * key_heads)))


def counters(key_heads: int, device: torch.device) -> torch.Tensor:
    """Return counters for `attend`, which are zero before and after every launch."""
    return torch.zeros(MOST_TOKENS * key_heads, dtype=torch.int32, device=device)


class Layer(NamedTuple):
    """Arguments of `attend` that are the same in every step of a layer.

    A token attends to the last `window` tokens, itself included; 0 means all. `sinks` is bf16 [query heads]. `rotation`
    is float32 [positions, 64], cosines before sines; with it `attend` rotates query and key in Neox style. None means
    that they are rotated already. Each layer has `tickets` of its own (`counters`), because launches of two layers may
    overlap.
    """

    scale: float
    tickets: torch.Tensor
    window: int = 0
    sinks: torch.Tensor | None = None
    rotation: torch.Tensor | None = None


def attend(
    new: Projections,
    cache: Cache,
    layer: Layer,
    output: torch.Tensor,
    *,
    shared_by: int = 0,
    least: int = LEAST_STEPS,
) -> None:
    """Store one new token per sequence in the cache, and write its attention to bf16 `output` [T, query heads, 64].

    `shared_by` overrides the number of splits; `least` is the minimum of 16-token steps per split. The function does
    not wait for the device, so a CUDA graph can capture it. Raises ValueError, with the tensor's name, for tensors that
    the kernel does not support, and NotImplementedError if it cannot run on the device.
    """
    query, key, value = new
    _refuse(new, cache, query.shape[0])
    (tokens, heads, _), key_heads, device = query.shape, key.shape[1], query.device
    _require("cache.table", cache.table[:tokens], torch.int32, (tokens, None), device, strided=1)
    if layer.sinks is not None:
        _require("layer.sinks", layer.sinks, torch.bfloat16, (heads,), device)
    if layer.rotation is not None:
        _require("layer.rotation", layer.rotation, torch.float32, (None, WIDTH), device)
    _require("layer.tickets", layer.tickets[: tokens * key_heads], torch.int32, (tokens * key_heads,), device)
    _require("output", output[:tokens], torch.bfloat16, (tokens, heads, WIDTH), device)
    library = load(device)
    count = shared_by or splits(tokens, key_heads, layer.window, _processors(device))
    parts = torch.empty(tokens * key_heads * count * PART if count > 1 else 0, device=device)
    tensors = (
        *new, cache.data, cache.table, cache.lengths, cache.slots, layer.sinks, layer.rotation, output, parts,
        layer.tickets,
    )  # fmt: skip
    job = Attention(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        tokens, key_heads, heads // key_heads, count, least, layer.window, cache.data.shape[2],
        query.stride(0), key.stride(0), value.stride(0), cache.table.stride(0), *cache.strides(), layer.scale,
    )  # fmt: skip
    warps = FEW_WARPS if 0 < layer.window <= ROWS * FEW_WARPS else WARPS
    extension.launch(library, "spark_attention", job, warps, device=device)


def rotate_and_store(new: Projections, cache: Cache, starts: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Write rotated keys and the values to the cache, and return the rotated query [T, query heads, 64].

    The last tokens of sequence i are the new tokens `starts[i]` to `starts[i + 1]` (int32 [sequences + 1]). `rotation`
    is as in Layer; `cache.table` is not read. Raises as `attend` does.
    """
    query, key, value = new
    sequences = max(1, starts.numel() - 1)
    _refuse(new, cache, sequences)
    _require("starts", starts, torch.int32, (sequences + 1,), query.device)
    _require("rotation", rotation, torch.float32, (None, WIDTH), query.device)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tensors = (*new, cache.data, starts, cache.lengths, cache.slots, rotation, output)
    job = Rotation(
        *(tensor.data_ptr() for tensor in tensors),
        query.shape[0], sequences, query.shape[1], key.shape[1], cache.data.shape[2],
        query.stride(0), key.stride(0), value.stride(0), *cache.strides(),
    )  # fmt: skip
    extension.launch(load(query.device), "spark_rotation", job, device=query.device)
    return output


def _refuse(new: Projections, cache: Cache, sequences: int) -> None:
    """Raise ValueError with the tensor's name if the kernels do not support a tensor of `new` or `cache`."""
    query, key, value = new
    if query.dim() != 3 or key.dim() != 3 or not heads_fit(query.shape[1], key.shape[1], query.shape[2]):
        raise ValueError(
            f"attention cannot run · query {tuple(query.shape)} and key {tuple(key.shape)} are not [tokens, heads, "
            f"{WIDTH}] with up to {GROUP} query heads for each key head · set SPARK_MXFP4_ATTENTION=vllm"
        )
    (tokens, heads, _), key_heads, device = query.shape, key.shape[1], query.device
    _require("query", query, torch.bfloat16, (tokens, heads, WIDTH), device, strided=1)
    _require("key", key, torch.bfloat16, (tokens, key_heads, WIDTH), device, strided=1)
    _require("value", value, torch.bfloat16, (tokens, key_heads, WIDTH), device, strided=1)
    _require("cache.data", cache.data, torch.bfloat16, (None, key_heads, None, 2 * WIDTH), device, strided=3)
    _require("cache.lengths", cache.lengths[:sequences], torch.int32, (sequences,), device)
    _require("cache.slots", cache.slots[:tokens], torch.int64, (tokens,), device)


def _require(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
    *,
    strided: int = 0,
) -> None:
    """Raise ValueError unless `tensor` has this dtype, shape and device, and is contiguous.

    None stands for any size but 0. The first `strided` dimensions may have any stride. For bf16 tensors the stride must
    keep rows aligned, because they are loaded by vectors.
    """
    sizes = tuple(tensor.shape)
    vectors = strided > 0 and dtype == torch.bfloat16
    if tensor.dtype != dtype or tensor.device != device:
        problem = f"is {tensor.dtype} on {tensor.device}, not {dtype} on {device}"
    elif len(sizes) != len(shape) or 0 in sizes or any(n not in (None, m) for n, m in zip(shape, sizes, strict=True)):
        problem = f"has the shape {sizes}, not ({', '.join(str(wanted or 'any') for wanted in shape)})"
    elif not tensor[(0,) * strided].is_contiguous() or (vectors and any(n % VECTOR for n in tensor.stride()[:strided])):
        problem = f"has the strides {tensor.stride()}, which the kernel does not support"
    elif vectors and tensor.data_ptr() % (VECTOR * tensor.itemsize):
        problem = "is not aligned to 16 bytes"
    else:
        return
    raise ValueError(f"attention cannot run · {name} {problem} · set SPARK_MXFP4_ATTENTION=vllm")


def rotated(x: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return bf16 `x` [T, heads, 64] rotated by torch, bit for bit equal to the kernels' result."""
    cosine, sine = rotation[positions].bfloat16().float()[:, None].chunk(2, dim=-1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1).bfloat16()


def reference(new: Projections, cache: Cache, layer: Layer) -> torch.Tensor:
    """Return attention by torch, float32 [T, query heads, 64], and update the cache: the reference for `attend`."""
    query, key, value = new
    if layer.rotation is not None:
        newest = cache.lengths.long().clamp(min=1) - 1
        query, key = rotated(query, layer.rotation, newest), rotated(key, layer.rotation, newest)
    size = cache.data.shape[2]
    output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for token, (length, slot) in enumerate(zip(cache.lengths.tolist(), cache.slots.tolist(), strict=True)):
        if slot >= 0:
            cache.data[slot // size, :, slot % size] = torch.cat([key[token], value[token]], dim=-1)
        if length == 0:
            continue
        positions = torch.arange(max(0, length - layer.window) if layer.window else 0, length, device=query.device)
        rows = cache.data[cache.table[token, positions // size].long(), :, positions % size].float()
        rows = rows.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # [positions, query heads, 128]
        scores = torch.einsum("hd,phd->hp", query[token].float(), rows[..., :WIDTH]) * layer.scale
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks.float()[:, None]], dim=1)
        shares = scores.softmax(-1)[:, : len(positions)]
        output[token] = torch.einsum("hp,phd->hd", shares, rows[..., WIDTH:])
    return output


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def load(device: torch.device) -> ctypes.CDLL:
    """Return the kernels for `device`; without a library from `precompile`, the first call builds them.

    Raises NotImplementedError as `extension.library` does.
    """
    target = extension.target(device)
    path = extension.library(precompile.STEP, target, "attention's kernels", "set SPARK_MXFP4_ATTENTION=vllm")
    return extension.bind(path, FUNCTIONS)
