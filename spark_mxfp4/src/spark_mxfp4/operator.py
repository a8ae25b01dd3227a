"""A kernel as one torch operator, because torch.compile cannot trace a choice of experts that depends on data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.profiler import record_function

from spark_mxfp4 import registry
from spark_mxfp4.experts import GPT_OSS, Activation, ExpertWeights, Projection, TopK
from spark_mxfp4.kernel import MoeKernel


def run(
    kernel: MoeKernel,
    x: torch.Tensor,
    weights: ExpertWeights,
    chosen: TopK,
    activation: Activation = GPT_OSS,
) -> torch.Tensor:
    """Return `kernel.run`'s result (see `experts.moe`); while torch.compile traces, call it as an operator.

    The operator finds the kernel again by its name, so a traced graph may be stored and used by another process.
    """
    if not torch.compiler.is_compiling():
        with record_function("spark_mxfp4::moe"):  # profiler traces then show the operator's name
            return kernel.run(x, weights, *chosen, **_named(activation))
    output: torch.Tensor = moe_operator(x, *weights.gate_up, *weights.down, *chosen, list(activation), kernel.name)
    return output


@torch.library.custom_op("spark_mxfp4::moe", mutates_args=())
def moe_operator(  # noqa: PLR0913, PLR0917 (an operator takes tensors, not tuples of them)
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: Sequence[float],
    kernel: str,
) -> torch.Tensor:
    """Run the kernel of that name, [T, H] → [T, H], as the operator `spark_mxfp4::moe`."""
    weights = ExpertWeights(Projection(gate_up, gate_up_scales, gate_up_bias), Projection(down, down_scales, down_bias))
    output = _load(kernel).run(x, weights, topk_ids, topk_weights, expert_map, **_named(Activation(*activation)))
    return output.clone() if output is x else output  # an operator must not return its input


@moe_operator.register_fake
def _shape(x: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(x)


def _named(activation: Activation) -> dict[str, Any]:
    """Return `activation` as a keyword; omit gpt-oss', because kernels need not have this parameter."""
    return {} if activation == GPT_OSS else {"activation": activation}


@cache
def _load(name: str) -> MoeKernel:
    return registry.load(name)
