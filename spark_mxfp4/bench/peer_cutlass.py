"""Measure FlashInfer's CUTLASS experts on the layers on which measure_experts.py measures our kernel.

MXFP4 weights, bf16 activations, compute capability 9.0. Weights are laid out and the kernel is called as by
vLLM 0.32.0's backend FLASHINFER_CUTLASS_MXFP4_BF16 on Hopper. FlashInfer must be installed, with its module
`fused_moe_90` compiled, or with a compiler.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import torch
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.fused_moe import (
    cutlass_fused_moe,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
)
from torch.nn import functional

import common
from spark_mxfp4.experts import GPT_OSS, Activation, ExpertWeights, Projection
from spark_mxfp4.kernels import timing
from spark_mxfp4.kernels.check import LayerSizes, error, random_routing, random_weights, reference

ALIGNMENT = 128  # both sizes are padded with zeros to a multiple of this, as in vLLM for this backend
WARMUPS, REPEATS = 1, 5  # of each tactic; FlashInfer's own 3 and 10 would take minutes for all numbers of tokens


class CutlassLayer(NamedTuple):
    """A layer in the layout of `cutlass_fused_moe`; each tuple of two has gate_up's tensor, then down's."""

    weights: tuple[torch.Tensor, torch.Tensor]  # u8, interleaved for the kernel's conversion to bf16
    scales: tuple[torch.Tensor, torch.Tensor]  # u8, folded
    biases: tuple[torch.Tensor, torch.Tensor]  # bf16 [E, 2I'] and [E, H']
    activation: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # alpha, beta, limit: float32 [E] each


def measure(model: LayerSizes, tokens: tuple[int, ...], activation: Activation, routing: str) -> list[dict[str, Any]]:
    """Check and time one call of `cutlass_fused_moe` for each number of tokens, with tactics chosen beforehand.

    The time is that of the whole call: sorting, both products with the activation, weighted sum. It does not include
    padding activations to the kernel's width, because vLLM pads the model's hidden state once. FlashInfer's autotuner
    chooses the tactics for these numbers of tokens.
    """
    sizes, bias = (model.experts, model.hidden, model.intermediate), activation == GPT_OSS
    plain = random_weights(*sizes, bias=bias)
    layers = [prepare(random_weights(*sizes, bias=bias), activation) for _ in range(common.LAYERS - 1)]
    layers.append(prepare(plain, activation))
    tuner, most = AutoTuner.get(), max(tokens)
    tuner.warmup, tuner.repeat = WARMUPS, REPEATS
    with autotune(True, tuning_buckets=tokens):
        run(padded(_inputs(most, model)), layers[-1], *random_routing(most, model.experts, model.top_k, routing))
    with autotune(False, tuning_buckets=tokens):
        routes = {n: [random_routing(n, model.experts, model.top_k, routing) for _ in layers] for n in tokens}
        return [_measured(model, routes[number], layers, plain, activation) for number in tokens]


def _measured(
    model: LayerSizes,
    routes: list[tuple[torch.Tensor, torch.Tensor]],
    layers: list[CutlassLayer],
    plain: ExpertWeights,
    activation: Activation,
) -> dict[str, Any]:
    """Return the result for `routes`' number of tokens; `plain` has the last layer's weights in checkpoint layout."""
    number = len(routes[0][0])
    x = _inputs(number, model)
    wide = padded(x)
    touched = statistics.mean(len(set(ids.flatten().tolist())) for ids, _ in routes)
    computed = run(wide, layers[-1], *routes[-1])[:, : model.hidden]
    deviation = error(computed, reference(x, plain, *routes[-1], activation=activation))
    us = timing.graph_time(
        lambda i: run(wide, layers[i % len(layers)], *routes[i % len(layers)]), common.count_of(number)
    )
    row = {**common.figures(model, number, touched, us), "error": deviation}
    common.print_row("peer_cutlass", row)
    return row


def run(x: torch.Tensor, layer: CutlassLayer, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the layer's output bf16 [T, H'] for `x` bf16 [T, H'], `ids` int32 [T, k] and `shares` float32 [T, k]."""
    output = torch.empty_like(x)
    alpha, beta, limit = layer.activation
    cutlass_fused_moe(
        input=x,
        token_selected_experts=ids,
        token_final_scales=shares,
        fc1_expert_weights=layer.weights[0],
        fc2_expert_weights=layer.weights[1],
        fc1_expert_biases=layer.biases[0],
        fc2_expert_biases=layer.biases[1],
        swiglu_alpha=alpha,
        swiglu_beta=beta,
        swiglu_limit=limit,
        output=output,
        output_dtype=x.dtype,
        quant_scales=list(layer.scales),
        use_w4_group_scaling=True,
    )
    return output


def prepare(weights: ExpertWeights, activation: Activation) -> CutlassLayer:
    """Return a layer of packed weights with biases in the kernel's layout: up rows first, then gate rows; padded."""
    interleaved, folded, biases = [], [], []
    for blocks, scales, bias in (_halves(weights.gate_up), _whole(weights.down)):
        interleaved.append(interleave_moe_weights_for_sm90_mixed_gemm(blocks, "fp4"))
        folded.append(interleave_moe_scales_for_sm90_mixed_gemm(scales))
        biases.append(bias)
    experts, device = weights.down.weight.shape[0], weights.down.weight.device
    alpha, beta, limit = (
        torch.full((experts,), value, device=device) for value in (activation.alpha, activation.shift, activation.limit)
    )
    return CutlassLayer(
        (interleaved[0], interleaved[1]), (folded[0], folded[1]), (biases[0], biases[1]), (alpha, beta, limit)
    )


def padded(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [T, H] with zeros up to a multiple of ALIGNMENT columns."""
    return functional.pad(x, (0, -x.shape[1] % ALIGNMENT))


def _inputs(number: int, model: LayerSizes) -> torch.Tensor:
    return torch.randn(number, model.hidden, device="cuda").bfloat16()


def _halves(gate_up: Projection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `_whole` of the odd rows (ups), then of the even rows (gates); each half is padded separately."""
    halves = (Projection(*(None if tensor is None else tensor[:, first::2] for tensor in gate_up)) for first in (1, 0))
    blocks, scales, bias = (torch.cat(parts, dim=1) for parts in zip(*map(_whole, halves), strict=True))
    return blocks, scales, bias


def _whole(projection: Projection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks u8 [E, N', K'/2], scales u8 [E, N', K'/32] and bias bf16 [E, N'], padded with zeros."""
    weight, scales, bias = projection
    if scales is None:
        raise ValueError("the peer takes packed weights · these are dense · pass random_weights")
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias
    rows, columns = -weight.shape[1] % ALIGNMENT, -2 * weight.shape[2] % ALIGNMENT
    return (
        functional.pad(weight, (0, columns // 2, 0, rows)).contiguous(),
        functional.pad(scales, (0, columns // 32, 0, rows)).contiguous(),
        functional.pad(bias.bfloat16(), (0, rows)).contiguous(),
    )
