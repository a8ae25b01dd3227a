"""The residual's sum and RMS norm in one launch, which overlaps the kernels before and behind it (norm.cuh)."""

from __future__ import annotations

import torch

from spark_mxfp4.kernels import attention, extension

MOST_COLUMNS = 384 * 8 * 4  # norm.cuh
Norm = extension.structure("Norm")


@torch.library.custom_op("spark_mxfp4::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of `x` + `residual` (bf16 [M, H]) times `weight` (bf16 [H]), and the sum; see `reference`.

    H is a multiple of 8 up to MOST_COLUMNS; tensors are contiguous and aligned to 16 bytes. Raises ValueError, with the
    tensor's name, for others, and NotImplementedError where the kernel cannot run.
    """
    if x.dim() != 2 or not 0 < x.shape[1] <= MOST_COLUMNS or x.shape[1] % 8:
        raise ValueError(
            f"the norm cannot run · x has the shape {tuple(x.shape)}, not [M, H] with H a multiple of 8 up to "
            f"{MOST_COLUMNS} · use torch.nn.functional.rms_norm"
        )
    for name, tensor, shape in (("x", x, x.shape), ("residual", residual, x.shape), ("weight", weight, x.shape[1:])):
        if tensor.dtype != torch.bfloat16 or tensor.shape != shape or tensor.device != x.device:
            wanted = f"bfloat16 {tuple(shape)} on {x.device}"
            problem = f"is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, not {wanted}"
        elif not tensor.is_contiguous() or tensor.data_ptr() % 16:
            problem = "is not contiguous and aligned to 16 bytes"
        else:
            continue
        raise ValueError(f"the norm cannot run · {name} {problem} · use torch.nn.functional.rms_norm")
    output, total = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        job = Norm(*(tensor.data_ptr() for tensor in (x, residual, weight, output, total)), *x.shape, epsilon)
        extension.launch(attention.load(x.device), "spark_norm", job, device=x.device)
    return output, total


@add_rms_norm.register_fake
def _shapes(x: torch.Tensor, _residual: object, _weight: object, _epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `add_rms_norm` returns, by torch: vLLM's definition (vllm/ir/ops/layernorm.py)."""
    total = x.float() + residual.float()
    normal = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return normal.bfloat16() * weight, total.bfloat16()
