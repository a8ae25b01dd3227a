"""OpenAI's triton_kernels on the same layers, called as by vLLM 0.32.0 on Hopper. Its folder must be on `sys.path`."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import triton_kernels.matmul_ogs_details.opt_flags as options
import triton_kernels.swiglu
from triton_kernels import routing as their_routing
from triton_kernels.matmul_ogs import FlexCtx, FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
from triton_kernels.numerics import InFlexData
from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
from triton_kernels.tensor_details import layout

import common
from spark_mxfp4.experts import GPT_OSS, Activation, Projection
from spark_mxfp4.kernels import timing
from spark_mxfp4.kernels.check import LayerSizes, random_scores, random_weights

Prepared = tuple[Any, Any, torch.Tensor | None]  # weights, precision with the scales, bias


def measure(model: LayerSizes, tokens: tuple[int, ...], activation: Activation, routing: str) -> list[dict[str, Any]]:
    """Time both products for each number of tokens, without the sorting before them, which our time includes.

    The SwiGLU of triton_kernels always adds 1 to the linear half, so results for plain SiLU are wrong; times are valid.
    """
    options.update_opt_flags_constraints({"split_k": 1})
    layers = [
        tuple(
            map(_prepared, random_weights(model.experts, model.hidden, model.intermediate, bias=activation == GPT_OSS))
        )
        for _ in range(common.LAYERS)
    ]
    specs = FnSpecs("swiglu", triton_kernels.swiglu.swiglu_fn, ("alpha", "limit"))
    fused = FusedActivation(specs, (activation.alpha, activation.limit), 2)
    # The routing kernels compile only if top-k is a power of two. Their torch reference has the same result.
    route = their_routing.routing if model.top_k.bit_count() == 1 else their_routing.routing_torch
    rows = []
    for number in tokens:
        x = torch.randn(number, model.hidden, device="cuda").bfloat16()
        routes = [route(random_scores(number, model.experts, routing), model.top_k) for _ in layers]
        touched = statistics.mean(int((data.expt_hist > 0).sum()) for data, _, _ in routes)

        def once(i: int, x: torch.Tensor = x, routes: list[Any] = routes) -> None:
            """Compute both products; layers and routings take turns, so that no weights stay in the cache."""
            data, gather, scatter = routes[i % len(routes)]
            (w1, p1, b1), (w2, p2, b2) = layers[i % len(layers)]
            hidden = matmul_ogs(x, w1, b1, data, gather_indx=gather, precision_config=p1, fused_activation=fused)
            matmul_ogs(hidden, w2, b2, data, scatter_indx=scatter, precision_config=p2, gammas=data.gate_scal)

        rows.append(common.figures(model, number, touched, timing.graph_time(once, common.count_of(number))))
        common.print_row("peer", rows[-1])
    return rows


def _prepared(projection: Projection) -> Prepared:
    values, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    factors, factor_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    if projection.scales is None:
        raise ValueError("the peer takes packed weights · these are dense · pass random_weights")
    scales = torch.nn.functional.pad(projection.scales, (0, -projection.scales.shape[-1] % 4))
    weight = convert_layout(wrap_torch_tensor(projection.weight.transpose(-2, -1), dtype=FP4), values, **value_options)
    scale = convert_layout(wrap_torch_tensor(scales.transpose(-2, -1)), factors, **factor_options)
    precision = PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=InFlexData()))
    return weight, precision, None if projection.bias is None else projection.bias.float()
