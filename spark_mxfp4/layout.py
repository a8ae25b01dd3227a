"""Between a checkpoint's packed experts and what a kernel takes: padding with zeros, and the kernel's own layout."""

from __future__ import annotations

from torch.nn import functional

from spark_mxfp4.experts import ExpertWeights, Projection
from spark_mxfp4.mxfp4 import BLOCK
from spark_mxfp4.registry import Kernel


def prepare(kernel: Kernel, weights: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
    """Return `weights` (packed, sizes H and I) padded to the kernel's sizes and in its layout; themselves if they are.

    Padded elements, scales and biases are 0, so the values beyond H and I are 0 and change no sum.
    """
    wide, deep = kernel.padded(hidden, intermediate)
    if (wide, deep) != (hidden, intermediate):
        weights = ExpertWeights(_pad(weights.gate_up, 2 * deep, wide), _pad(weights.down, wide, deep))
    return kernel.prepare(weights)


def restore(kernel: Kernel, weights: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
    """Undo `prepare`: return the checkpoint's bytes again, contiguous."""
    padded = kernel.restore(weights, *kernel.padded(hidden, intermediate))
    return ExpertWeights(_cut(padded.gate_up, 2 * intermediate, hidden), _cut(padded.down, hidden, intermediate))


def _pad(projection: Projection, rows: int, columns: int) -> Projection:
    weight, scales, bias = projection
    if scales is None:
        raise ValueError("only packed experts are padded · these are dense · quantize them first")
    more = rows - weight.shape[1]
    return Projection(
        functional.pad(weight, (0, columns // 2 - weight.shape[2], 0, more)),
        functional.pad(scales, (0, columns // BLOCK - scales.shape[2], 0, more)),
        None if bias is None else functional.pad(bias, (0, more)),
    )


def _cut(projection: Projection, rows: int, columns: int) -> Projection:
    weight, scales, bias = projection
    if scales is None:
        raise ValueError("only packed experts are cut · these are dense · quantize them first")
    return Projection(
        weight[:, :rows, : columns // 2].contiguous(),
        scales[:, :rows, : columns // BLOCK].contiguous(),
        None if bias is None else bias[:, :rows].contiguous(),
    )
