"""Residual addition and RMS norm in one launch, which overlaps the kernels before and after it (norm.cuh).

With tensor parallelism the launch also sums the partial results of all ranks and so replaces the all-reduce before it.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from spark_mxfp4.kernels import attention, extension

MOST_COLUMNS = 384 * 8 * 4  # norm.cuh
MOST_TOKENS = 64  # of a launch that adds the ranks' parts; with more tokens bandwidth is the limit, not latency
Norm, Peers = extension.structure("Norm"), extension.structure("Peers")


class Ranks(NamedTuple):
    """GPUs of one host whose partial results are added: `boxes` are the addresses of their inboxes, int64 [ranks].

    An inbox has `inbox_bytes` zeros before the first launch. `buffers` (int32 [MOST_TOKENS], zeros at first) has, for
    each token, the number of the inbox's next buffer. All ranks must launch the same norms in the same order.
    """

    boxes: torch.Tensor
    buffers: torch.Tensor
    rank: int


def inbox_bytes(ranks: int, columns: int) -> int:
    """Return the bytes of a rank's inbox for norms of up to `columns` columns."""
    return MOST_TOKENS * 3 * ranks * columns * torch.bfloat16.itemsize


@torch.library.custom_op("spark_mxfp4::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of `x` + `residual` (bf16 [M, H]) times `weight` (bf16 [H]), and the sum; see `reference`.

    H is a multiple of 8 up to MOST_COLUMNS; tensors are contiguous and aligned to 16 bytes. Other tensors raise
    ValueError with their name. Raises NotImplementedError if the kernel cannot run.
    """
    return _normalise(x, residual, weight, epsilon, Peers(None, None, 1, 0))


def reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `add_rms_norm` returns for the sum of all ranks' `x` (bf16 [M, H], M up to MOST_TOKENS).

    The parts are added in float32 in the order of the ranks, so every rank gets the same bits. Raises what
    `add_rms_norm` raises. If a rank does not launch, the other devices wait forever, as in any collective operation.
    """
    if x.shape[0] > MOST_TOKENS:
        problem = f"x has {x.shape[0]} tokens, and {MOST_TOKENS} is the most"
        raise ValueError(f"the ranks' parts cannot be added · {problem} · use torch.distributed.all_reduce")
    return _normalise(
        x, residual, weight, epsilon,
        Peers(ranks.boxes.data_ptr(), ranks.buffers.data_ptr(), len(ranks.boxes), ranks.rank),
    )  # fmt: skip


def _normalise(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, peers: ctypes.Structure
) -> tuple[torch.Tensor, torch.Tensor]:
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
        extension.launch(attention.load(x.device), "spark_norm", job, peers, device=x.device)
    return output, total


@add_rms_norm.register_fake
def _shapes(x: torch.Tensor, _residual: object, _weight: object, _epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `add_rms_norm` returns, computed by torch as vLLM defines it (vllm/ir/ops/layernorm.py)."""
    total = x.float() + residual.float()
    normal = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return normal.bfloat16() * weight, total.bfloat16()
