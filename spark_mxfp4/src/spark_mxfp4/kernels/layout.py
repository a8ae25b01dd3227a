"""The Hopper kernel's byte order of MXFP4 weights, applied once at load and reversible.

64 rows by 64 columns are one chunk of 2176 bytes. Its first 2048 bytes give each of 128 threads 16 bytes: four words,
one for each step of the matrix instruction. A word's eight nibbles are the A fragment of lane l (wgmma m64k16 in the
PTX ISA): rows l/4 and l/4 + 8 of its warp's 16, positions p = 2(l%4), p + 1, p + 8 and p + 9. The columns may have any
order that the activations share. Lanes with l%4 below 2 get columns 0-31 of the chunk and the others 32-63, so
that a lane needs one scale a row. Bits are ordered so that few shifts and masks move them to the sign, exponent and
mantissa of bf16. The last 128 bytes are scales, ordered by warp, l/4, half of the columns (first or second 32), and row
(l/4 or l/4 + 8).

Gate and up rows, interleaved in gpt-oss, become alternating groups of eight gates and their eight ups, so that a thread
holds both.
"""

from __future__ import annotations

from functools import cache

import torch

from spark_mxfp4.experts import ExpertWeights, Projection
from spark_mxfp4.mxfp4 import BLOCK

ROWS = COLUMNS = 64
VALUE_BYTES = ROWS * COLUMNS // 2
SCALE_BYTES = ROWS * COLUMNS // BLOCK
CHUNK_BYTES = VALUE_BYTES + SCALE_BYTES
# For each of a word's four pairs of nibbles, the bits of the first nibble's sign, exponent (two) and mantissa, in the
# word's low half. The second nibble's are 16 higher. expand_word in format.cuh reads the same bits.
BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (14, 2, 1, 0), (13, 11, 10, 9))
BATCHES = 64  # of a layer: each keeps a GPU busy, and its temporary tensors need a twentieth of the layer's memory
FACTOR_BIAS = 126  # a scale byte s is stored as s + 126, the exponent of bf16's 2^(s - 1)
# The largest scale byte s: above it bf16 cannot hold 2^(s - 1). With s = 128, a scale of 2, a weight is at most 12.
WIDEST = 128


def pack(weights: ExpertWeights) -> ExpertWeights:
    """Return both projections in the kernel's order; see `pack_projection`."""
    return ExpertWeights(pack_projection(weights.gate_up, paired=True), pack_projection(weights.down, paired=False))


def fits(weights: ExpertWeights) -> bool:
    """Tell whether all scales fit the kernel: none above 2^1 and none NaN. Waits for the device."""
    return all(p.scales is not None and not bool((p.scales > WIDEST).any()) for p in weights)


def unpack(packed: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
    """Undo `pack` exactly for weights of the sizes H and I; biases stay float32."""
    return ExpertWeights(
        unpack_projection(packed.gate_up, 2 * intermediate, hidden, paired=True),
        unpack_projection(packed.down, hidden, intermediate, paired=False),
    )


def pack_projection(projection: Projection, *, paired: bool) -> Projection:
    """Return `projection` (u8 [E, N, K/2], [E, N, K/32]) in the kernel's order, padded with zeros.

    The result has weight u8 [E, row tiles, chunks, 2176], no scales (they are inside) and bias float32
    [E, row tiles · 64], zeros if there was none. `paired` means that gate and up rows are interleaved; then the number
    of row tiles is even. A few experts are packed at a time, to limit peak memory.
    Raises ValueError for dense weights, shapes that are not MXFP4, and scales that do not fit.
    """
    weight, scales, bias = projection
    if scales is None or weight.dim() != 3 or scales.shape != (*weight.shape[:2], weight.shape[2] * 2 // BLOCK):
        raise ValueError(
            f"cannot lay out weights of shape {tuple(weight.shape)} · the kernel takes MXFP4, u8 [E, N, K/2], "
            "with scales [E, N, K/32] · keep SPARK_MXFP4_MODE=packed"
        )
    experts, rows, half_columns = weight.shape
    tiles, chunks = _tiles(rows, paired=paired), -(-2 * half_columns // COLUMNS)
    order = _row_order(rows, tiles, paired=paired).to(weight.device)
    if bool((scales > WIDEST).any()):
        raise ValueError(
            f"cannot lay out these weights · a scale is above 2^{WIDEST - 127} or NaN · use kernels.fused for the layer"
        )
    packed = torch.empty(experts, tiles, chunks, CHUNK_BYTES, dtype=torch.uint8, device=weight.device)
    sums = torch.zeros(experts, tiles * ROWS, dtype=torch.float32, device=weight.device)
    at_once = max(1, experts // BATCHES)
    for batch in map(slice, range(0, experts, at_once), range(at_once, experts + at_once, at_once)):
        values = _padded(weight[batch], chunks * COLUMNS // 2)[:, order]
        factors = _padded(scales[batch] + FACTOR_BIAS, chunks * 2)[:, order]
        packed[batch, ..., :VALUE_BYTES] = _pack_values(values.flatten(0, 1)).view(-1, tiles, chunks, VALUE_BYTES)
        packed[batch, ..., VALUE_BYTES:] = _pack_scales(factors.flatten(0, 1)).view(
            -1, tiles, chunks, CHUNK_BYTES - VALUE_BYTES
        )
        if bias is not None:
            sums[batch] = _padded(bias[batch, :, None].float(), 1)[:, order, 0]
    return Projection(packed, None, sums)


def unpack_projection(packed: Projection, rows: int, columns: int, *, paired: bool) -> Projection:
    """Undo `pack_projection`: u8 [E, rows, columns/2], u8 [E, rows, columns/32], bias float32 [E, rows]."""
    weight, _, bias = packed
    if bias is None or weight.dim() != 4:
        raise ValueError("cannot undo the layout · these weights are not packed · pass what pack_projection returned")
    order = _row_order(rows, weight.shape[1], paired=paired).to(weight.device)
    inverse = torch.argsort(order, stable=True)[:rows]
    values, unpacked = [], []
    for expert in weight:
        values.append(_unpack_values(expert[..., :VALUE_BYTES])[inverse, : columns // 2])
        unpacked.append(_unpack_scales(expert[..., VALUE_BYTES:])[inverse, : columns // BLOCK] - FACTOR_BIAS)
    return Projection(torch.stack(values), torch.stack(unpacked), bias[:, inverse])


def _tiles(rows: int, *, paired: bool) -> int:
    """Return the number of row tiles; with `paired` an even one, because two make one chunk of the next product."""
    return -(-rows // (2 * ROWS)) * 2 if paired else -(-rows // ROWS)


def _row_order(rows: int, tiles: int, *, paired: bool) -> torch.Tensor:
    """Return the source row of each row of the layout; the index `rows`, one past the last, means padding."""
    order = torch.arange(tiles * ROWS)
    if paired:
        # A warp's 16 rows are eight gates and their eight ups, which give eight outputs. These are one 16-byte vector
        # of the next product's input, in the order of columns that format.cuh (pair_at) explains.
        # [chunk; tile and warp: v/2, v%2; gate or up; half, pair, column]
        # from [chunk; half, v/2, pair, v%2, column; gate or up]
        order = order.view(-1, 2, 4, 2, 2, 2, 2).permute(0, 2, 4, 6, 1, 3, 5).reshape(-1)
    return order.clamp(max=rows)


def _padded(matrices: torch.Tensor, columns: int) -> torch.Tensor:
    """Return [n, rows, c] with zero columns up to `columns` and one zero row below."""
    padded = matrices.new_zeros(matrices.shape[0], matrices.shape[1] + 1, columns)
    padded[:, :-1, : matrices.shape[2]] = matrices
    return padded


def _pack_values(matrix: torch.Tensor) -> torch.Tensor:
    """Turn bytes [tiles · 64, chunks · 32] into [tiles, chunks, 2048]."""
    # Rows are [tile, warp, half, l/4]; columns [chunk, block, step, bit 2, bit 1], and bit 0 the nibble of a byte.
    source = matrix.view(-1, 4, 2, 8, matrix.shape[1] // 32, 2, 4, 2, 2)
    source = source.permute(0, 4, 1, 3, 5, 7, 6, 8, 2)  # tile, chunk, warp, l/4, l%4 (block, bit 2), step, bit 1, half
    packed = torch.zeros(source.shape[:7], dtype=torch.int32, device=matrix.device)
    for pair, table in enumerate(pair_words(matrix.device)):
        packed |= table[source[..., pair // 2, pair % 2].int()]
    return packed.view(torch.uint8).reshape(*packed.shape[:2], VALUE_BYTES)


@cache
def pair_words(device: torch.device) -> torch.Tensor:
    """Return int32 [4, 256]: the bits of a word for each of its four pairs and each value of the pair's byte."""
    byte = torch.arange(256, dtype=torch.int32)
    tables = torch.zeros(len(BITS), 256, dtype=torch.int32)
    for pair, bits in enumerate(BITS):
        for nibble in (0, 1):
            for position, bit in enumerate(bits):
                tables[pair] |= ((byte >> (4 * nibble + 3 - position)) & 1) << (bit + 16 * nibble)
    return tables.to(device)


def _unpack_values(values: torch.Tensor) -> torch.Tensor:
    """Undo `_pack_values`."""
    tiles, chunks = values.shape[:2]
    packed = values.contiguous().view(torch.int32).view(tiles, chunks, 4, 8, 2, 2, 4)
    parts = torch.zeros(*packed.shape, 2, 2, dtype=torch.int32, device=values.device)
    for pair, bits in enumerate(BITS):
        for nibble in (0, 1):
            for position, bit in enumerate(bits):
                parts[..., pair // 2, pair % 2] |= ((packed >> (bit + 16 * nibble)) & 1) << (4 * nibble + 3 - position)
    return parts.permute(0, 2, 8, 3, 1, 4, 6, 5, 7).reshape(tiles * ROWS, chunks * 32).to(torch.uint8)


def _pack_scales(matrix: torch.Tensor) -> torch.Tensor:
    """Turn scale bytes [tiles · 64, chunks · 2] into [tiles, chunks, 128]."""
    source = matrix.view(-1, 4, 2, 8, matrix.shape[1] // 2, 2)
    return source.permute(0, 4, 1, 3, 5, 2).reshape(source.shape[0], source.shape[4], -1)


def _unpack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Undo `_pack_scales`."""
    tiles, chunks = scales.shape[:2]
    return scales.reshape(tiles, chunks, 4, 8, 2, 2).permute(0, 2, 5, 3, 1, 4).reshape(tiles * ROWS, chunks * 2)
