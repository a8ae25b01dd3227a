"""The mixture of experts in Triton, for any GPU that Triton supports.

Weights keep the checkpoint's layout. They are the left operand of each product and are expanded in registers to bf16.
For many tokens on compute capability 12.x they are expanded to E4M3 with their E8M0 scales, for the block-scaled matrix
instruction (W4A8-MX; activations are then quantised to MXFP8). bf16 and E4M3 both represent E2M1 exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from spark_mxfp4.experts import GPT_OSS, Activation, ExpertWeights, Projection, TopK
from spark_mxfp4.kernels import tuning
from spark_mxfp4.kernels.mxfp8 import quantize_rows
from spark_mxfp4.kernels.sorting import Blocks, local_expert, sort_into_blocks
from spark_mxfp4.mxfp4 import BLOCK

MAX_EXPERTS, MAX_TOP_K = 512, 16
SCALED_SINCE = (3, 8)  # earlier versions of Triton emulate block-scaled products on 12.x (docs/hardware.md)
LARGEST_OFFSET = 2**31 - 1  # in elements of activations: the kernels count in 32 bits


class Tiles(NamedTuple):
    """One product's tile: weight rows, tokens and columns, warps and pipeline stages, and whether it is W4A8-MX."""

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int
    scaled: bool = False


def moe(
    x: torch.Tensor,
    weights: ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    activation: Activation = GPT_OSS,
) -> torch.Tensor:
    """Return the weighted sum [T, H] of the experts' outputs for `x` [T, H] in x's dtype; see `experts.moe`.

    `weights` are packed MXFP4 as in the checkpoint. Raises ValueError for dense weights, more than 512 experts or a
    top-k above 16.
    """
    return tiled(x, weights, TopK(topk_ids, topk_weights, expert_map), activation)


def tiled(
    x: torch.Tensor, weights: ExpertWeights, chosen: TopK, activation: Activation = GPT_OSS, tiles: Tiles | None = None
) -> torch.Tensor:
    """Return what `moe` returns, computed with `tiles` instead of the tuned tiles. Raises ValueError as `moe` does."""
    topk_ids, topk_weights, expert_map = chosen
    _check(x, weights, topk_ids)
    result = torch.empty_like(x)
    if topk_ids.numel() == 0:
        return result
    top_k, pairs = topk_ids.shape[1], topk_ids.numel()
    if tiles is None:
        name = torch.cuda.get_device_name(x.device) if x.device.type == "cuda" else ""
        tiles = choose(name, pairs, weights.down.weight.shape[0])
    blocks = sort_into_blocks(topk_ids, weights.down.weight.shape[0], tiles.tokens, expert_map)
    hidden = torch.empty(pairs, weights.down.weight.shape[2] * 2, dtype=x.dtype, device=x.device)
    output = torch.empty(pairs, x.shape[1], dtype=x.dtype, device=x.device)
    multiply(x.contiguous(), weights.gate_up, blocks, hidden, tiles, activation)
    multiply(hidden, weights.down, blocks, output, tiles)
    columns = min(1024, triton.next_power_of_2(x.shape[1]))
    ids = topk_ids.contiguous()
    reduce[(x.shape[0], triton.cdiv(x.shape[1], columns))](
        output, ids, ids if expert_map is None else expert_map, topk_weights.contiguous(), result,
        pairs, 0 if expert_map is None else expert_map.numel(), weights.down.weight.shape[0], x.shape[1],
        TOP_K=top_k, COLUMNS=columns,
    )  # fmt: skip
    return result


def multiply(
    x: torch.Tensor,
    projection: Projection,
    blocks: Blocks,
    out: torch.Tensor,
    tiles: Tiles,
    activation: Activation | None = None,
) -> None:
    """Write one grouped product to `out` [pairs, ·]. `activation` marks the first product, whose `x` is [tokens, ·]."""
    weight, scales, bias = projection
    rows, columns = weight.shape[1], 2 * weight.shape[2]
    x_scales = x
    if tiles.scaled:
        x, x_scales = quantize_rows(x)
        x = x.view(torch.uint8)
    pairs = out.shape[0]
    top_k = pairs // x.shape[0] if activation else 0
    grid = (blocks.experts.numel() * triton.cdiv(rows, tiles.rows),)
    grouped_gemm[grid](
        x, x_scales, weight, scales, weight if bias is None else bias, out, blocks.pairs, blocks.experts,
        pairs, rows, columns, *(activation or GPT_OSS), TOP_K=top_k, BIAS=bias is not None, SCALED=tiles.scaled,
        ROWS=tiles.rows, TOKENS=tiles.tokens, COLUMNS=tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def choose(device: str, pairs: int, experts: int) -> Tiles:
    """Return the tuned tiles for `pairs` among `experts` on the GPU of that name, adapted to this Triton version."""
    tiles = Tiles(**tuning.tiles(device, pairs, experts))
    if tiles.scaled and tuple(map(int, triton.__version__.split(".")[:2])) < SCALED_SINCE:
        return tiles._replace(scaled=False, columns=tiles.columns // 2)  # bf16 elements take two bytes, not one
    return tiles


def _check(x: torch.Tensor, weights: ExpertWeights, topk_ids: torch.Tensor) -> None:
    widest = max(x.shape[-1], weights.down.weight.shape[-1] * 2)
    problems: dict[str, Any] = {
        "the weights are not packed MXFP4": any(p.scales is None or p.weight.dim() != 3 for p in weights),
        f"x is {tuple(x.shape)}, not [T, H]": x.dim() != 2 or x.shape[-1] != 2 * weights.gate_up.weight.shape[-1],
        f"top-k is {topk_ids.shape[-1]}, more than {MAX_TOP_K}": topk_ids.shape[-1] > MAX_TOP_K,
        f"{weights.down.weight.shape[0]} experts are more than {MAX_EXPERTS}": weights.down.weight.shape[0]
        > MAX_EXPERTS,
        f"x has {x.shape[-1]} columns, no multiple of {BLOCK}": x.shape[-1] % BLOCK,
        f"{topk_ids.numel()} pairs of token and expert are too many": topk_ids.numel() * widest > LARGEST_OFFSET,
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(f"kernel 'triton' cannot run · {problem} · pass MXFP4 experts, or use kernel 'torch'")


# Within a kernel every argument is a tl.tensor: a pointer to the first element, a number, or a tile in registers.


@triton.jit
def _weights_bf16(
    codes: tl.tensor,
    scales: tl.tensor,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """E2M1 bytes [ROWS, COLUMNS / 2] and E8M0 bytes [ROWS, COLUMNS / 32] to bf16 [ROWS, COLUMNS], exact."""
    elements = tl.join(codes & 15, codes >> 4).reshape(ROWS, COLUMNS // 32, 32).to(tl.uint32)
    # Move sign, exponent and mantissa to float32's bits: the value times 2^-126, also for the subnormal 0.5.
    small = (((elements & 8) << 28) | ((elements & 7) << 22)).to(tl.float32, bitcast=True)
    # 2^(s - 127): the byte is float32's exponent, except that 0 is a subnormal and 255 is NaN.
    bits = scales.to(tl.uint32)
    bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
    factor = bits.to(tl.float32, bitcast=True).reshape(ROWS, COLUMNS // 32, 1)
    return (small * 8.507059173023462e37 * factor).to(tl.bfloat16).reshape(ROWS, COLUMNS)  # 2^126


@triton.jit
def _weights_e4m3(codes: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:  # noqa: N803
    """E2M1 bytes [ROWS, COLUMNS / 2] to E4M3 [ROWS, COLUMNS], each the value times 2^-6, exact."""
    low = ((codes << 4) & 0x80) | ((codes << 2) & 0x1C)
    high = (codes & 0x80) | ((codes >> 2) & 0x1C)
    return tl.join(low, high).reshape(ROWS, COLUMNS).to(tl.float8e4nv, bitcast=True)


@triton.jit
def grouped_gemm(  # noqa: PLR0913, PLR0917
    x_ptr: tl.tensor, x_scales_ptr: tl.tensor, w_ptr: tl.tensor, w_scales_ptr: tl.tensor, bias_ptr: tl.tensor,
    out_ptr: tl.tensor, pairs_ptr: tl.tensor, experts_ptr: tl.tensor,
    pairs: tl.tensor, rows: tl.tensor, columns: tl.tensor, alpha: tl.tensor, limit: tl.tensor,
    shift: tl.tensor,
    TOP_K: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Compute one tile of ROWS weight rows by TOKENS pairs of one expert; TOP_K above 0 means the first product.

    `x_ptr` [T or pairs, columns] and `out_ptr` [pairs, rows or rows / 2] are row-major, `w_ptr` u8 [E, rows,
    columns / 2], `w_scales_ptr` u8 [E, rows, columns / 32], `bias_ptr` [E, rows]; `x_scales_ptr` u8 [·, columns / 32]
    is read if SCALED. `pairs_ptr` and `experts_ptr` are those of `sorting.Blocks`, in blocks of TOKENS.
    """
    row_blocks = tl.cdiv(rows, ROWS)
    block = tl.program_id(0) // row_blocks
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    row = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs_ptr + block * TOKENS + tl.arange(0, TOKENS))
    valid = pair < pairs
    source = pair // TOP_K if TOP_K > 0 else pair
    inside = row < rows
    # Offsets within one expert's weights, and within the activations, are below 2^31: as 32-bit numbers they take half
    # the registers of pointers.
    w_ptr += expert * rows * (columns // 2)
    w_scales_ptr += expert * rows * (columns // 32)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(0, columns, COLUMNS):
        byte = first // 2 + tl.arange(0, COLUMNS // 2)
        of_scale = first // 32 + tl.arange(0, COLUMNS // 32)
        column = first + tl.arange(0, COLUMNS)
        codes = tl.load(
            w_ptr + row[:, None] * (columns // 2) + byte[None, :],
            mask=inside[:, None] & (byte < columns // 2)[None, :], other=0,
        )  # fmt: skip
        scales = tl.load(
            w_scales_ptr + row[:, None] * (columns // 32) + of_scale[None, :],
            mask=inside[:, None] & (of_scale < columns // 32)[None, :], other=0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + source[None, :] * columns + column[:, None],
            mask=valid[None, :] & (column < columns)[:, None], other=0,
        )  # fmt: skip
        if SCALED:
            x_scales = tl.load(
                x_scales_ptr + source[:, None] * (columns // 32) + of_scale[None, :],
                mask=valid[:, None] & (of_scale < columns // 32)[None, :], other=0,
            )  # fmt: skip
            w = _weights_e4m3(codes, ROWS, COLUMNS)
            x = x.to(tl.float8e4nv, bitcast=True)
            total = tl.dot_scaled(w, scales, "e4m3", x, x_scales, "e4m3", total)
        else:
            total = tl.dot(_weights_bf16(codes, scales, ROWS, COLUMNS).to(x.dtype), x, total)
    if SCALED:
        total *= 64.0  # 2^6, see _weights_e4m3
    if BIAS:
        total += tl.load(bias_ptr + expert * rows + row, mask=inside, other=0).to(tl.float32)[:, None]
    if TOP_K > 0:
        gate, up = tl.split(total.reshape(ROWS // 2, 2, TOKENS).permute(0, 2, 1))
        gate = tl.where(gate > limit, limit, gate)  # comparisons, so that NaN stays NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        total = (up + shift) * (gate / (1.0 + tl.exp(-alpha * gate)))
        row = tl.program_id(0) % row_blocks * (ROWS // 2) + tl.arange(0, ROWS // 2)
        rows = rows // 2
    at = out_ptr + pair[None, :] * rows + row[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=valid[None, :] & (row < rows)[:, None])


@triton.jit
def reduce(  # noqa: PLR0913, PLR0917
    output_ptr: tl.tensor, ids_ptr: tl.tensor, map_ptr: tl.tensor, shares_ptr: tl.tensor, result_ptr: tl.tensor,
    pairs: tl.tensor, known: tl.tensor, experts: tl.tensor, width: tl.tensor,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Add up a token's experts in the order of its routing, so that every run gives the same bits."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in range(TOP_K):
        pair = token * TOP_K + j
        expert = local_expert(ids_ptr, map_ptr, pair, pairs, known)
        share = tl.load(shares_ptr + pair).to(tl.float32)
        value = tl.load(output_ptr + pair * width + column, mask=column < width, other=0).to(tl.float32)
        if (expert >= 0) & (expert < experts):  # the rows of experts on other devices were never written
            total += share * value
    tl.store(result_ptr + token * width + column, total.to(result_ptr.dtype.element_ty), mask=column < width)
