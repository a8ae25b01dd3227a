"""Dense products with MXFP4, MXFP8 or FP8 weights and bfloat16 activations, for few tokens, at the speed of memory.

`Weight.pack` lays a matrix out once; `run` multiplies. The kernel is linear.cu, for compute capability 9.0 and 12.x.
A chunk is 16 rows by 64 columns. Lane l of a warp has its rows l/4 and l/4 + 8 and its columns 16(l%4) to 16(l%4) + 15,
so that a lane needs one E8M0 scale a row and its activations are contiguous. In MXFP4 each lane has 16 bytes with the
bits in the order of layout.BITS, and 32 scale bytes follow; in E4M3 each lane has twice 16 bytes, see `_pack_e4m3`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from spark_mxfp4.kernels import extension, precompile
from spark_mxfp4.kernels.layout import pair_words
from spark_mxfp4.mxfp4 import BLOCK, E4M3_LARGEST, dequantize, dequantize_mxfp8, quantize, quantize_mxfp8

ROWS, COLUMNS = 16, 64  # of a chunk
MOST_TOKENS = 64
FEW_ROWS = 4096  # most rows for which a block has at most one tile, with two blocks on each of 132 multiprocessors
MANY_ROWS = 32_768  # from this number on, as in an LM head, every warp has its own rows
ROWS_AT_ONCE = 8192  # quantised at once, a multiple of ROWS: a whole LM head would need gigabytes of temporary memory
POINTER, INT = ctypes.c_void_p, ctypes.c_int
FUNCTIONS = {
    "spark_linear": (POINTER, INT, INT, INT, INT, POINTER),
    "spark_linear_expand": (POINTER, INT, POINTER),
}


class Format(IntEnum):
    """How weights are stored; the numbers are linear.cu's."""

    MXFP4 = 0  # E2M1, an E8M0 scale for 32 columns: 4.25 bits a weight
    MXFP8 = 1  # E4M3, an E8M0 scale for 32 columns: 8.25 bits
    FP8 = 2  # E4M3, a float32 scale for each row: 8 bits

    @property
    def chunk_bytes(self) -> int:
        """Bytes of 16 rows by 64 columns in the kernel's order."""
        return {Format.MXFP4: 544, Format.MXFP8: 1056, Format.FP8: 1024}[self]


@dataclass(frozen=True)
class Weight:
    """A matrix [rows, columns] in the kernel's order.

    `data` is u8 [tiles, chunks, chunk bytes]; `row_scales` float32 [tiles · 16], for FP8 only.
    """

    data: torch.Tensor
    row_scales: torch.Tensor | None
    format: Format
    rows: int
    columns: int

    @classmethod
    def pack(cls, matrix: torch.Tensor, format_: Format) -> Weight:
        """Quantise `matrix` (float [N, K], K a multiple of 32) and lay it out.

        Raises ValueError for other shapes, for NaN and infinity, and for weights that are too large for the kernel's
        scales (MXFP4: magnitudes of 16 and more; MXFP8: of 2^16 and more).
        """
        if matrix.dim() != 2 or matrix.shape[1] % BLOCK:
            raise ValueError(
                f"cannot pack a matrix of shape {tuple(matrix.shape)} · it is not [N, K] with K a multiple of {BLOCK} "
                "· pad its columns with zeros"
            )
        parts = [cls._pack_rows(rows, format_) for rows in matrix.split(ROWS_AT_ONCE)]
        scales = [part.row_scales for part in parts if part.row_scales is not None]
        data = torch.cat([part.data for part in parts])
        return cls(data, torch.cat(scales) if scales else None, format_, *matrix.shape)

    @classmethod
    def _pack_rows(cls, matrix: torch.Tensor, format_: Format) -> Weight:
        if format_ == Format.MXFP4:
            return cls.from_mxfp4(*quantize(matrix))
        if format_ == Format.MXFP8:
            return cls.from_mxfp8(*quantize_mxfp8(matrix))
        largest = matrix.abs().amax(1).float()
        if not bool(largest.isfinite().all()):
            raise ValueError("cannot pack this matrix · it has values that are NaN or infinite · keep it in bfloat16")
        scales = torch.where(largest == 0, 1.0, largest / E4M3_LARGEST)
        return cls.from_fp8((matrix.float() / scales[:, None]).to(torch.float8_e4m3fn), scales)

    @classmethod
    def from_mxfp4(cls, blocks: torch.Tensor, scales: torch.Tensor) -> Weight:
        """Lay out `blocks` (u8 [N, K/32, 16]) and `scales` (u8 [N, K/32]), bytes as from `mxfp4.quantize`."""
        rows, columns = blocks.shape[0], blocks.shape[1] * BLOCK
        values = _padded(blocks.reshape(rows, -1), COLUMNS // 2)
        tiles, chunks = values.shape[0] // ROWS, values.shape[1] // 32
        source = values.view(tiles, 2, 8, chunks, 4, 4, 2).permute(0, 3, 2, 4, 5, 6, 1)  # …, l%4, step, bit 1, half
        words = torch.zeros(source.shape[:5], dtype=torch.int32, device=blocks.device)
        for pair, table in enumerate(pair_words(blocks.device)):
            words |= table[source[..., pair // 2, pair % 2].int()]
        data = words.view(torch.uint8).reshape(tiles, chunks, 512)
        return cls(_with_scales(data, scales, 126), None, Format.MXFP4, rows, columns)

    @classmethod
    def from_mxfp8(cls, elements: torch.Tensor, scales: torch.Tensor) -> Weight:
        """Lay out `elements` (float8_e4m3fn [N, K]) and `scales` (u8 [N, K/32])."""
        data = _with_scales(_pack_e4m3(elements), scales, 120)
        return cls(data, None, Format.MXFP8, *elements.shape)

    @classmethod
    def from_fp8(cls, elements: torch.Tensor, row_scales: torch.Tensor) -> Weight:
        """Lay out `elements` (float8_e4m3fn [N, K]) with one float32 scale a row, [N]."""
        scales = _padded(row_scales.float().view(-1, 1), 1).flatten().contiguous()
        return cls(_pack_e4m3(elements), scales, Format.FP8, *elements.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.data.nbytes + (0 if self.row_scales is None else self.row_scales.nbytes)


def reference(matrix: torch.Tensor, format_: Format) -> torch.Tensor:
    """Return the float32 values [N, K] of the weight that `Weight.pack` returns for the same arguments."""
    return torch.cat([_reference_rows(rows, format_) for rows in matrix.split(ROWS_AT_ONCE)])


def _reference_rows(matrix: torch.Tensor, format_: Format) -> torch.Tensor:
    if format_ == Format.MXFP4:
        return dequantize(*quantize(matrix))
    if format_ == Format.MXFP8:
        return dequantize_mxfp8(*quantize_mxfp8(matrix))
    largest = matrix.abs().amax(1, keepdim=True).float()
    scales = torch.where(largest == 0, 1.0, largest / E4M3_LARGEST)
    return (matrix.float() / scales).to(torch.float8_e4m3fn).float() * scales


def _padded(matrix: torch.Tensor, column_multiple: int) -> torch.Tensor:
    rows, columns = -(-matrix.shape[0] // ROWS) * ROWS, -(-matrix.shape[1] // column_multiple) * column_multiple
    if (rows, columns) == tuple(matrix.shape):
        return matrix.contiguous()
    padded = matrix.new_zeros(rows, columns)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def _pack_e4m3(elements: torch.Tensor) -> torch.Tensor:
    """Turn elements [N, K] into u8 [tiles, chunks, 1024]: two columns of row g and two of row g + 8 make a word.

    Bits of a word's low half: 15 and 10-4 for row g, 14, 13-11 and 3-0 for row g + 8; the high half: the next column.
    """
    values = _padded(elements.view(torch.uint8), COLUMNS).int()
    tiles, chunks = values.shape[0] // ROWS, values.shape[1] // COLUMNS
    source = values.view(tiles, 2, 8, chunks, 4, 2, 2, 2, 2)  # tile, half, g, chunk, t, step pair, step, bit 1, column
    own, other = source.unbind(1)
    halves = ((own & 0x80) << 8) | ((own & 0x7F) << 4) | ((other & 0xF0) << 7) | (other & 0x0F)
    words = halves[..., 0] | (halves[..., 1] << 16)  # tile, g, chunk, t, step pair, step, bit 1
    words = words.permute(0, 2, 4, 1, 3, 5, 6).contiguous()  # tile, chunk, step pair, g, t, step, bit 1
    return words.view(torch.uint8).reshape(tiles, chunks, 1024)


def _with_scales(data: torch.Tensor, scales: torch.Tensor, bias: int) -> torch.Tensor:
    """Return `data` with each chunk's 32 scale bytes after it: for each of 8 rows g: [block][g, g + 8]."""
    if bool((scales.int() + bias > 254).any()):
        raise ValueError(
            f"cannot lay out these weights · a scale is above 2^{254 - bias - 127} or NaN · keep them in bfloat16"
        )
    tiles, chunks = data.shape[:2]
    padded = _padded(scales + bias, 2).view(tiles, 2, 8, chunks, 2).permute(0, 3, 2, 4, 1)
    return torch.cat([data, padded.reshape(tiles, chunks, 32)], -1).contiguous()


Linear = extension.structure("Linear")


def run(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return bf16 `x` [M, K] times the transposed `weight`, plus `bias` (bf16 [N]): bf16 [M, N].

    Above 64 tokens the weight is expanded to bfloat16 for this one call. Sums are float32; the same inputs give the
    same bits. The host does not wait for the device, so CUDA graphs can capture the call; torch.compile sees one
    operator. Raises ValueError for other dtypes and sizes, NotImplementedError if the kernels cannot run.
    """
    return product(x, weight.data, weight.row_scales, bias, int(weight.format), (weight.rows, weight.columns))


def product(x: torch.Tensor, *others: Any) -> torch.Tensor:
    """Multiply as `run` does, with the arguments of `multiply`; use the operator only while torch.compile traces.

    Calling the operator takes the host longer than the rest of the call, and vLLM computes the LM head outside of its
    compiled graph, once for each token.
    """
    output: torch.Tensor = (linear_operator if torch.compiler.is_compiling() else multiply)(x, *others)
    return output


def multiply(
    x: torch.Tensor,
    data: torch.Tensor,
    row_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    format_: int,
    size: Sequence[int],
) -> torch.Tensor:
    """Multiply as `run` does, as the operator `spark_mxfp4::linear`; `size` is the weight's rows and columns."""
    rows, columns = size
    weight = Weight(data, row_scales, Format(format_), rows, columns)
    _check(x, weight, bias)
    if x.shape[0] > MOST_TOKENS:
        return torch.nn.functional.linear(x, dense(weight), bias)
    out = x.new_empty(x.shape[0], rows)
    if out.numel():
        _start(extension.aligned(x), weight, bias, out)
    return out


linear_operator = torch.library.custom_op("spark_mxfp4::linear", multiply, mutates_args=())


@linear_operator.register_fake
def _shape(
    x: torch.Tensor, _data: object, _scales: object, _bias: object, _format: int, size: Sequence[int]
) -> torch.Tensor:
    return x.new_empty(x.shape[0], size[0])


def dense(weight: Weight) -> torch.Tensor:
    """Return `weight` in bfloat16, [N, K]: exact for MXFP4 and MXFP8, rounded once for FP8."""
    out = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=weight.data.device)
    job = _job(weight, out)
    extension.launch(load(out.device), "spark_linear_expand", job, int(weight.format), device=out.device)
    return out


def variants(tokens: int, rows: int, chunks: int, format_: Format) -> tuple[tuple[int, int], ...]:
    """Return the variants of linear.cu to try, best first, each with its number of thread blocks per multiprocessor.

    The order was measured on an H200 (bench/results/linear-h200.json), and for the columns of o and half of qkv's rows
    on an H100 (bench/results/linear-tune-h100.json). A variant that does not fit the size or the device's shared memory
    is skipped, so smaller variants follow.
    """
    many = rows >= MANY_ROWS
    order: tuple[tuple[int, int], ...]
    if tokens <= 8:
        if many:
            order = ((10, 1), (11, 1)) if format_ == Format.MXFP4 else ((1, 1), (0, 2), (11, 1))
        elif chunks <= 32:
            order = ((3, 2), (2, 2)) if format_ == Format.MXFP4 else ((2, 2), (0, 2))
        elif chunks <= 45 or format_ == Format.MXFP4:
            order = ((0, 2 if format_ == Format.MXFP4 or rows <= FEW_ROWS else 1),)
        else:
            order = ((4, 1),)
        return (*order, (2, 1), (4, 1), (5, 1))
    if many and tokens <= 16:
        order = ((12, 1),) if format_ == Format.MXFP4 else ((6, 1), (13, 1))
    elif many:
        order = ((14, 1), (12, 1)) if format_ == Format.MXFP4 else ((15, 1), (13, 1))
    elif chunks <= 32:
        order = ((8, 2 if format_ == Format.MXFP4 else 1),)
    else:
        order = ((9, 1),) if chunks > 45 else ()  # (6, 1) takes at most 45 chunks
    return (*order, (6, 1), (7, 1), (9, 1), (5, 1))


def _start(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    library = load(x.device)
    job = _job(weight, out, x, bias)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    for variant, blocks in variants(x.shape[0], weight.rows, weight.data.shape[1], weight.format):
        numbers = (int(weight.format), variant, processors, blocks)
        if extension.launch(library, "spark_linear", job, *numbers, device=x.device):
            return
    raise NotImplementedError(
        f"no kernel for a weight of {weight.rows} by {weight.columns} · its columns are too many for this GPU's "
        "registers and shared memory · keep this layer in bfloat16"
    )


def _job(
    weight: Weight, out: torch.Tensor, x: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> ctypes.Structure:
    tiles, chunks = weight.data.shape[:2]
    pointers = (None if t is None else t.data_ptr() for t in (weight.row_scales, bias, x))
    tokens, stride = (0, 0) if x is None else (x.shape[0], x.stride(0))
    return Linear(
        weight.data.data_ptr(), *pointers, out.data_ptr(), tokens, weight.rows, weight.columns, chunks, tiles, 0, stride
    )


def _check(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> None:
    fits = x.dtype == torch.bfloat16 and x.dim() == 2 and x.shape[1] == weight.columns
    if not fits:
        raise ValueError(
            f"cannot multiply x {x.dtype} {tuple(x.shape)} by a weight of {weight.rows} by {weight.columns} · x must "
            "be bfloat16 [M, K] · convert or reshape it"
        )
    if bias is not None and (bias.dtype != torch.bfloat16 or tuple(bias.shape) != (weight.rows,)):
        raise ValueError(
            f"cannot add a bias {bias.dtype} {tuple(bias.shape)} to {weight.rows} rows · it must be bfloat16 [N] · "
            "convert it"
        )


@cache
def load(device: torch.device) -> ctypes.CDLL:
    """Return the kernels for `device`; without a library from `precompile`, the first call builds them.

    Raises NotImplementedError as `extension.library` does.
    """
    target = extension.target(device)
    path = extension.library(precompile.LINEAR, target, "dense kernels", "keep the layer in bfloat16")
    return extension.bind(path, FUNCTIONS)
