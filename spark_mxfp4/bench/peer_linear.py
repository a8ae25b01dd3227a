"""vLLM's dense products with FP8 and 4-bit weights, called as vLLM 0.32.0 calls them on compute capability 9.0.

Importing this module imports vLLM and its kernels, and raises ImportError if vLLM is not installed.

- `vLLM FP8` is the kernel of `--quantization-config.linear fp8_per_channel`: CUTLASS with a scale for each row of the
  weight and each token (CutlassFP8ScaledMMLinearKernel). It is timed twice: with activations that are already
  quantised, and with a kernel that quantises them before each product. In a server the compiler can fuse the quantising
  kernel into the operation before it, so the cost in a server is between the two.
- Marlin keeps activations in bfloat16 and expands the weights (`prepare_fp8_layer_for_marlin`,
  `prepare_fp4_layer_for_marlin`). Its locks are made once, as in a server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import vllm
from vllm import _custom_ops as operators
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4, marlin_utils_fp8

from spark_mxfp4.kernels.linear import ROWS_AT_ONCE, Format
from spark_mxfp4.mxfp4 import E4M3_LARGEST, SCALE_BIAS, quantize

VERSION = vllm.__version__
NVFP4_SCALE_BIAS = 7  # of E4M3: the smallest power of two of a scale byte is 2^-6


class PeerWeight(NamedTuple):
    """A weight in its kernel's layout.

    `multiply` takes the result of `PeerKernel.quantise`; `nbytes` is the number of bytes read.
    """

    multiply: Callable[[Any], torch.Tensor]
    nbytes: int


class PeerKernel(NamedTuple):
    """A kernel: `prepare` lays out a matrix bfloat16 [N, K] with the values of `linear.reference` in `format`.

    `quantise` converts the bfloat16 activations [M, K] and is not timed.
    """

    name: str
    format: Format
    prepare: Callable[[torch.Tensor], PeerWeight]
    quantise: Callable[[torch.Tensor], Any] = lambda x: x


def peers() -> tuple[PeerKernel, ...]:
    """Return vLLM's kernels for this device."""
    return (
        PeerKernel("vLLM FP8", Format.FP8, _cutlass, _by_token),
        PeerKernel("vLLM FP8 with quantisation", Format.FP8, _cutlass_with_quantisation),
        PeerKernel("Marlin FP8", Format.FP8, _marlin_fp8),
        PeerKernel("Marlin MXFP4", Format.MXFP4, _marlin_mxfp4),
        PeerKernel("Marlin NVFP4", Format.MXFP4, _marlin_nvfp4),
    )


def _by_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` in E4M3 and a float32 scale for each token, [M, 1]."""
    quantised, scales = operators.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    return quantised, scales


def _by_row(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `matrix` in E4M3 and a float32 scale for each row, [N, 1]: the values of Format.FP8."""
    largest = matrix.abs().amax(1, keepdim=True).float()
    scales = torch.where(largest == 0, 1.0, largest / E4M3_LARGEST)
    pieces = zip(matrix.split(ROWS_AT_ONCE), scales.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([(rows.float() / factors).to(torch.float8_e4m3fn) for rows, factors in pieces]), scales


def _cutlass(matrix: torch.Tensor) -> PeerWeight:
    weight, scales = _by_row(matrix)

    def multiply(activations: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the product of E4M3 activations [M, K] and their scales [M, 1] with the weight, bfloat16 [M, N]."""
        x, x_scales = activations
        return operators.cutlass_scaled_mm(x, weight.t(), x_scales, scales, torch.bfloat16)

    return PeerWeight(multiply, weight.nbytes + scales.nbytes)


def _cutlass_with_quantisation(matrix: torch.Tensor) -> PeerWeight:
    alone = _cutlass(matrix)
    return PeerWeight(lambda x: alone.multiply(_by_token(x)), alone.nbytes)


def _marlin_fp8(matrix: torch.Tensor) -> PeerWeight:
    weight, scales = _by_row(matrix)
    layer = _layer(matrix, weight.t(), scales)
    marlin_utils_fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=True)
    return _marlin(marlin_utils_fp8.apply_fp8_marlin_linear, matrix, layer)


def _marlin_mxfp4(matrix: torch.Tensor) -> PeerWeight:
    blocks, scales = _blocks(matrix)
    layer = _layer(matrix, blocks, scales)
    marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
    return _marlin(partial(marlin_utils_fp4.apply_fp4_marlin_linear, weight_global_scale=None), matrix, layer)


def _marlin_nvfp4(matrix: torch.Tensor) -> PeerWeight:
    """Lay out the values of MXFP4 in NVFP4: an E4M3 scale for 16 columns, and one float32 factor."""
    blocks, scales = _blocks(matrix)
    layer = _layer(matrix, blocks, *nvfp4_scales(scales))
    marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
    product = partial(marlin_utils_fp4.apply_fp4_marlin_linear, weight_global_scale=layer.weight_global_scale)
    return _marlin(product, matrix, layer)


def nvfp4_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (float8_e4m3fn [N, K/16], float32 scalar), equal to MXFP4's `scales` (u8 [N, K/32]).

    Scales smaller than 2^-14 of the largest become 0. Raises ValueError if the largest is zero.
    """
    largest = int(scales.max())
    if largest == 0:
        raise ValueError("cannot lay out this matrix · it is zero · pass another")
    exponents = scales.int() - largest + 8  # E4M3 holds 2^8
    fitting = torch.where(exponents > -NVFP4_SCALE_BIAS, (exponents + NVFP4_SCALE_BIAS) << 3, 0)
    factor = torch.tensor(2.0 ** (largest - SCALE_BIAS - 8), device=scales.device)
    return fitting.to(torch.uint8).repeat_interleave(2, 1).view(torch.float8_e4m3fn), factor


def _blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MXFP4's elements (u8 [N, K/2]) and scales (u8 [N, K/32]) of `matrix`."""
    parts = [quantize(rows) for rows in matrix.split(ROWS_AT_ONCE)]
    return torch.cat([blocks.flatten(1) for blocks, _ in parts]), torch.cat([scales for _, scales in parts])


def _layer(
    matrix: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None = None
) -> torch.nn.Module:
    """Return a module with the attributes that vLLM's functions expect of a linear layer."""
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = matrix.shape
    layer.orig_dtype = layer.params_dtype = matrix.dtype
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    if factor is not None:
        layer.weight_global_scale = torch.nn.Parameter(factor, requires_grad=False)
    return layer


def _marlin(product: Callable[..., torch.Tensor], matrix: torch.Tensor, layer: torch.nn.Module) -> PeerWeight:
    """Return the call of `product` with a layer that vLLM has prepared."""
    rows, columns = matrix.shape
    weight, scales = layer.weight.data, layer.weight_scale.data
    locks = marlin_utils.marlin_make_workspace_new(matrix.device, marlin_utils.MARLIN_MAX_BLOCKS_PER_SM)
    multiply = partial(
        product, weight=weight, weight_scale=scales, workspace=locks, size_n=rows, size_k=columns, bias=None
    )
    return PeerWeight(lambda x: multiply(input=x), weight.nbytes + scales.nbytes)
