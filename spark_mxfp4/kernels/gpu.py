"""The kernel that `SPARK_MXFP4_KERNEL=triton` names: the fastest that this GPU, its compiler and these weights allow.

On compute capability 9.0 with nvcc that is the CUDA kernel of `hopper`, which wants the weights in an order of its own;
everywhere else, and for layers with scales above 2^1, it is the Triton kernel, which takes the checkpoint's bytes.
"""

from __future__ import annotations

import torch

from spark_mxfp4.experts import ExpertWeights
from spark_mxfp4.kernels import fused, hopper, layout


def moe(
    x: torch.Tensor,
    weights: ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum [T, H] of the experts' outputs for `x` [T, H]; `weights` as `prepare` returned them."""
    kernel = hopper.moe if _laid_out(weights) else fused.moe
    return kernel(x, weights, topk_ids, topk_weights, expert_map)


def prepare(weights: ExpertWeights) -> ExpertWeights:
    """Return `weights` (packed MXFP4, as in the checkpoint) in the order that the chosen kernel wants.

    Biases that are not bfloat16 say that activations will not be either; those layers stay with Triton.
    Raises NotImplementedError for weights that are not on a CUDA device.
    """
    device = weights.down.weight.device
    if device.type != "cuda":
        raise NotImplementedError(
            f"kernel 'triton' cannot run on {device} · it needs an NVIDIA GPU · set SPARK_MXFP4_KERNEL=torch"
        )
    in_bfloat16 = all(p.bias is None or p.bias.dtype == torch.bfloat16 for p in weights)
    if hopper.available(device) and in_bfloat16 and layout.fits(weights):
        return hopper.prepare(weights)
    return weights


def restore(prepared: ExpertWeights, hidden: int, intermediate: int) -> ExpertWeights:
    """Undo `prepare` for weights of the sizes H and I: the checkpoint's bytes, biases in bfloat16 as they were."""
    if not _laid_out(prepared):
        return prepared
    plain = layout.unpack(prepared, hidden, intermediate)
    return ExpertWeights(*(p._replace(bias=None if p.bias is None else p.bias.bfloat16()) for p in plain))


def variant(prepared: ExpertWeights) -> str:
    """Return which kernel will run these weights: "hopper" (CUDA C++) or "triton"."""
    return "hopper" if _laid_out(prepared) else "triton"


def _laid_out(weights: ExpertWeights) -> bool:
    return weights.down.weight.dim() == 4


moe.prepare = prepare  # type: ignore[attr-defined]
moe.restore = restore  # type: ignore[attr-defined]
moe.variant = variant  # type: ignore[attr-defined]
