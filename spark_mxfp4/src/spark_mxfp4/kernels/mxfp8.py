"""Quantise activations to MXFP8 on the GPU, bit for bit as `mxfp4.quantize_mxfp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spark_mxfp4.mxfp4 import BLOCK

BLOCKS = 64  # blocks of 32 values for each Triton program


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (E4M3 [R, K], E8M0 u8 [R, K/32]) of `x` (bf16 or float32 [R, K], contiguous, K a multiple of 32)."""
    elements = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // BLOCK, dtype=torch.uint8, device=x.device)
    quantize[(triton.cdiv(scales.numel(), BLOCKS),)](x, elements, scales, scales.numel(), BLOCKS=BLOCKS)
    return elements.view(torch.float8_e4m3fn), scales


@triton.jit
def quantize(
    x_ptr: tl.tensor,
    elements_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,  # noqa: N803
) -> None:
    """Convert BLOCKS of `blocks` blocks: scale 2^(floor(log2(largest)) - 8), elements to nearest even, at most 448.

    `x_ptr` and `elements_ptr` (E4M3 as u8) are contiguous, 32 elements a block; `scales_ptr` is E8M0, u8, one a block.
    """
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at, mask=(block < blocks)[:, None], other=0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, axis=1)
    # The exponent field is floor(log2) + 127. Subnormals have the field 0 and get the lowest scale.
    scale = tl.maximum((largest >> 23) - 8, 0)
    finite = largest < 0x7F800000
    # Divide by 2^(scale - 127): multiply by 2^(127 - scale), which is a normal float32 for every scale.
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)[:, None]
    scaled = tl.abs(x * factor)
    bits = tl.minimum(scaled, 448.0).to(tl.int32, bitcast=True)
    # Round to nearest even with integers, the same on every GPU: three bits of mantissa, exponent bias 7 instead of
    # 127. Below 2^-6 round to multiples of 2^-9, the resolution of a float32 near 2^14.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (scaled + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(finite[:, None], tl.where(scaled < 0.015625, subnormal, normal) | sign, 0)
    tl.store(elements_ptr + at, code.to(tl.uint8), mask=(block < blocks)[:, None])
    tl.store(scales_ptr + block, tl.where(finite, scale, 255).to(tl.uint8), mask=block < blocks)
