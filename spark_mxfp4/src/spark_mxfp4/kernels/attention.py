"""Attention of one new token a sequence in one launch: rotary embedding, KV cache, softmax with sinks.

The kernels are attention.cuh's: for heads of 64 with up to eight query heads a key head, a bf16 cache in pages, and
compute capabilities 9.0 and 12.x. Sums are float32; probabilities are rounded to bfloat16 before they meet the values,
as FlashAttention's are.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from spark_mxfp4.kernels import extension, precompile
from spark_mxfp4.kernels.linear import CAPABILITIES

GROUP, WIDTH, ROWS = 8, 64, 16  # attention.cuh
WARPS, FEW_WARPS = 16, 8  # of a block; where they take a window at once
PART = GROUP * (WIDTH + 2)  # attention.cuh: floats of a block's part of a sum
MOST_TOKENS = 256  # sequences of a step; more are left to FlashAttention
MOST_SPLITS, LEAST_STEPS = 32, 16  # blocks that share a sequence; steps of 16 tokens that are worth a block
POINTER = ctypes.c_void_p


class Projections(NamedTuple):
    """Of new tokens, bf16: query [T, query heads, 64], key and value [T, key heads, 64]; rows may lie apart."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Cache(NamedTuple):
    """The KV cache of one layer in pages: `data` bf16 [blocks, key heads, block size, 128], keys before values."""

    data: torch.Tensor
    table: torch.Tensor  # int32 [sequences, blocks]
    lengths: torch.Tensor  # int32 [sequences], tokens with the new ones; 0 for padding
    slots: torch.Tensor  # int64 [tokens]: where new tokens go; negative: nowhere

    def strides(self) -> tuple[int, int, int]:
        """Return the distances of blocks, of heads and of tokens, in numbers."""
        block, head, token, _ = self.data.stride()
        return block, head, token


Attention = extension.structure("Attention")
Rotation = extension.structure("Rotation")


def fits(query_heads: int, key_heads: int, width: int, device: torch.device) -> bool:
    """Tell whether the kernels take heads of `width` and these numbers of them on `device`."""
    return (
        width == WIDTH
        and query_heads % key_heads == 0
        and query_heads <= GROUP * key_heads
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) in CAPABILITIES
    )


def splits(tokens: int, key_heads: int, window: int, processors: int) -> int:
    """Return how many blocks share a sequence: as many as `processors` take at once, if the window has work."""
    most = -(-window // (ROWS * WARPS)) if window else MOST_SPLITS
    return max(1, min(most, processors // (tokens * key_heads)))


def counters(key_heads: int, device: torch.device) -> torch.Tensor:
    """Return counters for `attend`, which are 0 between launches."""
    return torch.zeros(MOST_TOKENS * key_heads, dtype=torch.int32, device=device)


class Layer(NamedTuple):
    """What is the same in every step of a layer.

    `window` is how many tokens count, the new one among them; 0 for all. `sinks` is bf16 [query heads]. `rotation`,
    float32 [positions, 64] with cosines before sines, rotates query and key (Neox style); without it they are rotated
    already. `tickets` is this layer's own `counters`, since launches of two layers may overlap.
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
    """Write the attention of one new token a sequence to `output` [T, query heads, 64], and the token to the cache.

    `shared_by` and `least` override how a sequence is split. Nothing waits for the device, so CUDA graphs hold it.
    """
    query, key, value = new
    tokens, key_heads = query.shape[0], key.shape[1]
    device = query.device
    count = shared_by or splits(tokens, key_heads, layer.window, _processors(device))
    parts = torch.empty(tokens * key_heads * count * PART if count > 1 else 0, device=device)
    tensors = (
        *new, cache.data, cache.table, cache.lengths, cache.slots, layer.sinks, layer.rotation, output, parts,
        layer.tickets,
    )  # fmt: skip
    job = Attention(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        tokens, key_heads, query.shape[1] // key_heads, count, least, layer.window, cache.data.shape[2],
        query.stride(0), key.stride(0), value.stride(0), cache.table.stride(0), *cache.strides(), layer.scale,
    )  # fmt: skip
    library = load(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    warps = FEW_WARPS if 0 < layer.window <= ROWS * FEW_WARPS else WARPS
    extension.check(library.spark_attention(ctypes.byref(job), warps, stream), library.spark_step_error)


def rotate_and_store(new: Projections, cache: Cache, starts: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Write rotated keys and the values to the cache, and return the rotated query [T, query heads, 64].

    `starts`, int32 [sequences + 1], are the first tokens of the sequences, whose newest tokens these are; `rotation` is
    as in Layer.
    """
    query, key, value = new
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tensors = (*new, cache.data, starts, cache.lengths, cache.slots, rotation, output)
    job = Rotation(
        *(tensor.data_ptr() for tensor in tensors),
        query.shape[0], starts.shape[0] - 1, query.shape[1], key.shape[1], cache.data.shape[2],
        query.stride(0), key.stride(0), value.stride(0), *cache.strides(),
    )  # fmt: skip
    library = load(query.device)
    stream = torch.cuda.current_stream(query.device).cuda_stream
    extension.check(library.spark_rotation(ctypes.byref(job), stream), library.spark_step_error)
    return output


def rotated(x: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return bf16 `x` [T, heads, 64] rotated as the kernels are meant to, with torch."""
    cosine, sine = rotation[positions].bfloat16().float()[:, None].chunk(2, dim=-1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1).bfloat16()


def reference(new: Projections, cache: Cache, layer: Layer) -> torch.Tensor:
    """Return what `attend` is meant to write, float32 [T, query heads, 64], and write to the cache as it does."""
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


def prepare(device: torch.device) -> None:
    """Build and load the kernels where `device` runs them, so that the first step, or a CUDA graph, need not."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) in CAPABILITIES:
        load(device)


@cache
def load(device: torch.device) -> ctypes.CDLL:
    """Return the kernels for `device`, built when first used if `precompile` left none.

    Raises NotImplementedError where there are none and no nvcc.
    """
    target = "".join(map(str, torch.cuda.get_device_capability(device))) + "a"
    return bind(extension.library(precompile.STEP, target, "attention", "set SPARK_MXFP4_ATTENTION=vllm"))


def bind(path: str) -> ctypes.CDLL:
    """Load the shared library at `path` and declare its functions."""
    library = ctypes.CDLL(path)
    library.spark_step_error.restype = ctypes.c_char_p
    library.spark_attention.argtypes = (POINTER, ctypes.c_int, POINTER)
    library.spark_rotation.argtypes = library.spark_norm.argtypes = (POINTER, POINTER)
    return library
