"""The mixture of experts in torch: sorting by expert, two projections with SwiGLU between them, weighted sum.

It is the reference for tests of faster kernels, and the kernel on CPUs. Weights are floating point or packed MXFP4;
packed weights are dequantised for the selected experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from spark_mxfp4.mxfp4 import BLOCK_BYTES, dequantize

SWIGLU_ALPHA = 1.702  # openai/gpt-oss, gpt_oss/torch/model.py: swiglu(x, alpha=1.702, limit=7.0)
SWIGLU_LIMIT = 7.0  # config.json of gpt-oss: swiglu_limit
DEQUANTIZED_AT_ONCE = 1 << 18  # values: temporaries of 1 MB or less stay in cache, and malloc reuses them


class Activation(NamedTuple):
    """SwiGLU's parameters: (clamp(up, ±limit) + shift) · g · sigmoid(alpha · g) where g = min(gate, limit)."""

    alpha: float
    limit: float
    shift: float


GPT_OSS, SILU = Activation(SWIGLU_ALPHA, SWIGLU_LIMIT, 1.0), Activation(1.0, math.inf, 0.0)


class Projection(NamedTuple):
    """One projection of all E local experts, N outputs and K inputs.

    `weight` is u8 [E, N, K/2] with `scales` u8 [E, N, K/32], or floating point [E, N, K] with `scales` None.
    `bias` is [E, N] or None.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class ExpertWeights(NamedTuple):
    """A layer's experts: `gate_up` has N = 2I with gate and up rows interleaved, K = H; `down` has N = H, K = I."""

    gate_up: Projection
    down: Projection


class TopK(NamedTuple):
    """The experts that T tokens chose, and the weights of their outputs: `ids` int [T, k], `weights` [T, k].

    `expert_map` (int [global experts]) gives each expert's local number, or -1 if it is on another device.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    expert_map: torch.Tensor | None = None


class Sorting(NamedTuple):
    """Pairs of token and expert, sorted by expert.

    `pairs` i64 [T·k] indexes the flattened routing table; pair p belongs to token p // k. The pairs of local expert e
    are `pairs[offsets[e]:offsets[e + 1]]`; pairs after `offsets[E]` belong to experts on other devices.
    """

    pairs: torch.Tensor
    offsets: torch.Tensor


def moe_sorting(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None = None) -> Sorting:
    """Sort the pairs of `topk_ids` (int [T, k]) by expert, tokens in order within each; offsets are i64 [E + 1].

    `expert_map` (int [global experts]) gives each expert's local number below `num_experts`, or -1 if it is on another
    device. Negative ids select no expert. The host does not wait for the device: no shape depends on the ids.
    """
    ids = topk_ids.flatten().long()
    if expert_map is not None:
        ids = torch.where(ids < 0, -1, expert_map.long()[ids.clamp(min=0)])
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    expert, pairs = torch.sort(ids, stable=True)
    bounds = torch.arange(num_experts + 1, device=ids.device)
    return Sorting(pairs, torch.searchsorted(expert, bounds))


def swiglu(gate_up: torch.Tensor, activation: Activation = GPT_OSS) -> torch.Tensor:
    """Return the activation [..., I] of `gate_up` [..., 2I], whose even columns are gates and odd columns ups."""
    alpha, limit, shift = activation
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(min=-limit, max=limit)
    return (up + shift) * (gate * torch.sigmoid(alpha * gate))


def moe(
    x: torch.Tensor,
    weights: ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    activation: Activation = GPT_OSS,
) -> torch.Tensor:
    """Return the weighted sum [T, H] of the experts' outputs for `x` [T, H], in x's dtype.

    `topk_ids` (int [T, k]) and `topk_weights` (float [T, k]) are the routing. Experts that `expert_map` places on
    another device add nothing (see `moe_sorting`). Products have x's dtype; activation and sum are float32.
    """
    pairs, offsets = moe_sorting(topk_ids, weights.down.weight.shape[0], expert_map)
    bounds = offsets.tolist()
    active = [expert for expert, (begin, end) in enumerate(pairwise(bounds)) if begin < end]
    rows = [slice(bounds[expert], bounds[expert + 1]) for expert in active]
    local = pairs[: bounds[-1]]
    result = torch.zeros(topk_ids.numel(), x.shape[-1], dtype=torch.float32, device=x.device)
    if active:
        inputs = x[local // topk_ids.shape[-1]]
        hidden = swiglu(_project(inputs, weights.gate_up, active, rows).float(), activation).to(x.dtype)
        output = _project(hidden, weights.down, active, rows).float()
        result[local] = output * topk_weights.flatten()[local].float().unsqueeze(-1)
    return result.view(*topk_ids.shape, x.shape[-1]).sum(dim=1).to(x.dtype)


def _project(x: torch.Tensor, projection: Projection, experts: list[int], rows: list[slice]) -> torch.Tensor:
    """Return x [P, K] times the weights of the expert that owns each row, plus its bias: [P, N] in x's dtype."""
    outputs = []
    for expert, pairs, parts in zip(experts, rows, _dense(projection, experts, x.dtype), strict=True):
        bias = None if projection.bias is None else projection.bias[expert]
        products = [functional.linear(x[pairs], part, None if bias is None else bias[span]) for span, part in parts]
        outputs.append(products[0] if len(products) == 1 else torch.cat(products, dim=-1))
    return torch.cat(outputs)


Part = tuple[slice, torch.Tensor]


def _dense(projection: Projection, experts: list[int], dtype: torch.dtype) -> Iterator[Iterable[Part]]:
    """Yield the weights of each of `experts` in `dtype` as parts: a slice of the N rows, and their values [rows, K].

    Small experts are dequantised together, large experts part by part, so that no more than DEQUANTIZED_AT_ONCE values
    (or one row) are held at a time.
    """
    weight, scales, _ = projection
    if scales is None:
        yield from ([(slice(None), weight[expert])] for expert in experts)
        return
    count, columns = weight.shape[1], 2 * weight.shape[2]
    if count * columns > DEQUANTIZED_AT_ONCE:
        yield from (_parts(weight[expert], scales[expert], dtype) for expert in experts)
        return
    at_once = DEQUANTIZED_AT_ONCE // (count * columns)
    for begin in range(0, len(experts), at_once):
        chosen = torch.tensor(experts[begin : begin + at_once], device=weight.device)
        values = _unpack(weight.index_select(0, chosen), scales.index_select(0, chosen), dtype)
        yield from ([(slice(None), matrix)] for matrix in values)


def _parts(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Iterator[Part]:
    step = max(1, DEQUANTIZED_AT_ONCE // (2 * weight.shape[-1]))
    for begin in range(0, weight.shape[0], step):
        span = slice(begin, begin + step)
        yield span, _unpack(weight[span], scales[span], dtype)


def _unpack(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise weights with flattened blocks, u8 [..., K/2]."""
    return dequantize(weight.view(*weight.shape[:-1], weight.shape[-1] // BLOCK_BYTES, BLOCK_BYTES), scales, dtype)
