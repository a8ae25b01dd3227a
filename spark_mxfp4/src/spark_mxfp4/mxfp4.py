"""MXFP4: E2M1 elements in blocks of 32 along the last axis, each block with one E8M0 scale; and MXFP8 for activations.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 (MXFP4 and MXFP8), 5.3.1 (E4M3), 5.3.3 (E2M1),
5.4.1 (E8M0) and 6.3 (conversion). Two MXFP4 elements share a byte, the first in the low nibble, as in openai/gpt-oss
checkpoints.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

BLOCK = 32
BLOCK_BYTES = BLOCK // 2
SCALE_BIAS = 127
SCALE_NAN = 255
ELEMENT_EMAX = 2  # the exponent of E2M1's largest element, 6 = 1.5 · 2²
E4M3_EMAX, E4M3_LARGEST = 8, 448.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits; the fourth is the sign
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values [..., K] of `blocks` (u8 [..., K/32, 16]) and `scales` (u8 [..., K/32]) in `dtype`.

    Exact in float64, float32 and bfloat16, subnormals included, except that a product of 2^128 or more is infinite in
    float32 and bfloat16. float16 is the float32 value rounded to nearest, even on ties. Scale 255 makes its 32 values
    NaN. Raises ValueError for other shapes or dtypes.
    """
    check_packed(blocks, scales)
    _check_dtype(dtype)
    # A lookup by scale and byte gives both elements, on CPUs three times as fast as a lookup followed by a product.
    index = torch.add(blocks.to(torch.int32), scales.to(torch.int32).unsqueeze(-1), alpha=256)
    pairs = _pair_table(dtype, blocks.device).index_select(0, index.flatten())
    values = torch.view_as_real(pairs) if dtype == torch.float64 else pairs.view(dtype)
    return values.view(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (blocks u8 [..., K/32, 16], scales u8 [..., K/32]) of `x` (float [..., K], K a multiple of 32).

    The scale is 2^(floor(log2(largest magnitude)) - 2), as the specification proposes, limited to E8M0's 2^-127 to
    2^127. So magnitudes up to 8 times the scale occur, and those above 6 times saturate to 6. Elements round to
    nearest, even on ties, and keep their sign, also zeros. A block of zeros has scale byte 0. A block with a NaN or an
    infinity becomes all NaN (scale byte 255, elements 0), because E2M1 holds neither and a finite value would hide the
    fault. Quantising a result of `dequantize` changes no finite value, but may change bytes.
    Raises ValueError for other shapes or dtypes.
    """
    scaled, scales = _scaled(x, ELEMENT_EMAX)
    codes = torch.where((scales != SCALE_NAN).unsqueeze(-1), _round_to_codes(scaled), 0)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (elements float8_e4m3fn [..., K], scales u8 [..., K/32]) of `x` (float [..., K], K a multiple of 32).

    As `quantize`, with E4M3 elements: the scale is 2^(floor(log2(largest magnitude)) - 8), magnitudes above 448 times
    the scale saturate, and a block with a NaN or an infinity becomes NaN. Raises ValueError for other shapes or dtypes.
    """
    scaled, scales = _scaled(x, E4M3_EMAX)
    scaled = torch.where((scales != SCALE_NAN).unsqueeze(-1), scaled, 0.0).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(x.shape), scales


def dequantize_mxfp8(elements: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values [..., K] of `elements` (float8_e4m3fn) and `scales` (u8 [..., K/32]) in `dtype`.

    Exact in float64; float32 rounds products below its subnormals. Raises ValueError for other shapes or dtypes.
    """
    _check_dtype(dtype)
    if elements.dtype != torch.float8_e4m3fn or tuple(elements.shape) != (*scales.shape[:-1], scales.shape[-1] * BLOCK):
        raise ValueError(
            f"MXFP8 shapes disagree · elements {elements.dtype} {tuple(elements.shape)}, scales {tuple(scales.shape)} "
            f"· elements are float8_e4m3fn with {BLOCK} for each scale"
        )
    power = torch.where(scales == SCALE_NAN, torch.nan, 0.0).double() + scales.double() - SCALE_BIAS
    values = elements.double().view(*scales.shape, BLOCK) * torch.exp2(power).unsqueeze(-1)
    return values.view(elements.shape).to(dtype)


def _scaled(x: torch.Tensor, emax: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` in blocks [..., K/32, 32] divided by their scales, and the scales; `emax`: see ELEMENT_EMAX."""
    _check_dtype(x.dtype)
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"cannot quantize shape {tuple(x.shape)} · its last axis is not a multiple of {BLOCK} · pad it"
        )
    values = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    largest = values.abs().amax(-1)
    _, exponent = torch.frexp(largest)  # largest = m · 2^exponent with m in [0.5, 1), for subnormals too
    power = (exponent - 1 - emax).clamp(-SCALE_BIAS, SCALE_BIAS)
    power = torch.where(largest == 0, -SCALE_BIAS, power)
    scales = torch.where(largest.isfinite(), power + SCALE_BIAS, SCALE_NAN).to(torch.uint8)
    return torch.ldexp(values, -power.unsqueeze(-1)), scales


def check_packed(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise ValueError unless `blocks` is u8 [..., n, 16] and `scales` u8 [..., n]."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"MXFP4 needs uint8 · blocks are {blocks.dtype}, scales {scales.dtype} · pass the raw bytes")
    if tuple(blocks.shape) != (*scales.shape, BLOCK_BYTES):
        raise ValueError(
            f"MXFP4 shapes disagree · blocks {tuple(blocks.shape)}, scales {tuple(scales.shape)} · "
            f"blocks must be the scales' shape followed by {BLOCK_BYTES}"
        )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"MXFP4 does not convert {dtype} · it knows {', '.join(map(str, FLOATS))} · convert first")


def _round_to_codes(scaled: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes (u8) nearest to `scaled`, even on ties; magnitudes above 6 become 6."""
    # A code is the number of boundaries at or below the magnitude. A tie goes to the even code, so a boundary below
    # an odd code is the next float above the midpoint.
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)], dtype=scaled.dtype)
    above = torch.nextafter(middles, torch.full_like(middles, torch.inf))
    to_odd = torch.arange(1, len(MAGNITUDES)) % 2 == 1
    boundaries = torch.where(to_odd, above, middles).to(scaled.device)
    codes = torch.bucketize(scaled.abs().contiguous(), boundaries, right=True).to(torch.uint8)
    return codes | (torch.signbit(scaled).to(torch.uint8) << 3)


@cache
def _pair_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return 65,536 pairs of values in `dtype`, each viewed as one wider number; the index is 256 · scale + byte."""
    elements = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float64)
    byte = torch.arange(256)
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - SCALE_BIAS)
    powers[SCALE_NAN] = torch.nan
    pairs = torch.stack([elements[byte & 15], elements[byte >> 4]], dim=-1) * powers.view(256, 1, 1)
    pairs = pairs.flatten(0, 1).to(dtype).to(device)
    if dtype == torch.float64:  # two float64 values are viewed as one complex128: there is no integer of 128 bits
        return torch.view_as_complex(pairs)
    return pairs.view({2: torch.int32, 4: torch.int64}[dtype.itemsize]).flatten()
