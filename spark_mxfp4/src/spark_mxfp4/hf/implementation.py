"""The experts implementation `spark_mxfp4` of transformers 5.19: `model.set_experts_implementation("spark_mxfp4")`.

The model keeps its bf16 experts, so you can switch back. Each layer's MXFP4 copy (4.25 bits a weight) is made on first
use. To save memory, convert the model with `hf.convert_and_replace` instead.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from spark_mxfp4 import operator, registry
from spark_mxfp4.experts import ExpertWeights, Projection, TopK
from spark_mxfp4.hf.experts import PROJECTIONS, check_activation, prepare_padded
from spark_mxfp4.kernel import MoeKernel

NAME = "spark_mxfp4"
_COPY = "_spark_mxfp4_copy"


def register() -> None:
    """Register the implementation with transformers; may be called any number of times."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum [T, H] of gpt-oss experts [E, K, N], computed by our kernel from their MXFP4 copy.

    Raises ValueError for experts of another family, and NotImplementedError in training, as rounding has no gradient.
    """
    if torch.is_grad_enabled() and experts.training and experts.gate_up_proj.requires_grad:
        raise NotImplementedError(
            "the experts implementation 'spark_mxfp4' cannot train · rounding to MXFP4 has no gradient · "
            "call model.eval(), or model.set_experts_implementation('eager')"
        )
    kernel, weights = _packed_copy(experts)
    hidden, padded = hidden_states.shape[-1], kernel.padded(experts.hidden_size, experts.intermediate_size)[0]
    x = torch.nn.functional.pad(hidden_states, (0, padded - hidden)) if padded != hidden else hidden_states
    return operator.run(kernel, x, weights, TopK(top_k_index, top_k_weights))[..., :hidden]


@torch.compiler.disable
def _packed_copy(experts: Any) -> tuple[MoeKernel, ExpertWeights]:
    """Return a layer's kernel and packed weights; pack again if its weights, their device or the kernel changed."""
    name = registry.chosen_name(experts.gate_up_proj.device.type)
    parameters = [getattr(experts, projection) for projection in PROJECTIONS]
    state = (name, *((p.data_ptr(), _version(p), p.device, p.dtype) for p in parameters))
    cached = experts.__dict__.get(_COPY)
    if cached is None or cached[0] != state:
        kernel = registry.load(name)
        cached = (state, kernel, _quantized(experts, kernel))
        experts.__dict__[_COPY] = cached
    return cached[1], cached[2]


def _version(parameter: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor; 0 for tensors of inference mode, which do not count them."""
    return 0 if parameter.is_inference() else parameter._version  # noqa: SLF001 (torch has no other name for it)


@torch.no_grad()
def _quantized(experts: Any, kernel: MoeKernel) -> ExpertWeights:
    if getattr(experts, "is_concatenated", True) or not (experts.is_transposed and experts.has_bias):
        raise ValueError(
            f"the experts implementation 'spark_mxfp4' does not know {type(experts).__name__} · its weights are not "
            "laid out as gpt-oss' · call model.set_experts_implementation('eager')"
        )
    check_activation(experts.alpha, experts.limit)
    projections = []
    for name in PROJECTIONS:
        weight = getattr(experts, name).detach()
        parts = [kernel.quantize(expert.t().contiguous()) for expert in weight]
        blocks, scales = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
        projections.append(Projection(blocks.flatten(-2), scales, getattr(experts, f"{name}_bias").detach()))
    return prepare_padded(kernel, ExpertWeights(*projections), experts.hidden_size, experts.intermediate_size)
