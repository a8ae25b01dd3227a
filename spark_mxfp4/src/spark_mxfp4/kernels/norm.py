"""A layer's input added to the residual and normalised, in one launch that overlaps its neighbours (norm.cuh)."""

from __future__ import annotations

import ctypes

import torch

from spark_mxfp4.kernels import attention, extension

MOST_COLUMNS = 384 * 8 * 4  # norm.cuh
Norm = extension.structure("Norm")


@torch.library.custom_op("spark_mxfp4::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bf16 `x` + `residual` [M, H], normalised and times `weight` [H], and the sum; see `reference`.

    H is a multiple of 8 and at most MOST_COLUMNS.
    """
    x, residual = x.contiguous(), residual.contiguous()
    output, total = torch.empty_like(x), torch.empty_like(x)
    tensors = (x, residual, weight, output, total)
    job = Norm(*(tensor.data_ptr() for tensor in tensors), *x.shape, epsilon)
    library = attention.load(x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    extension.check(library.spark_norm(ctypes.byref(job), stream), library.spark_step_error)
    return output, total


@add_rms_norm.register_fake
def _shapes(x: torch.Tensor, _residual: object, _weight: object, _epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `add_rms_norm` is meant to, with torch: vLLM's definition (vllm/ir/ops/layernorm.py)."""
    total = x.float() + residual.float()
    normal = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return normal.bfloat16() * weight, total.bfloat16()
