"""gpt-oss' router for vLLM in one launch: logits, the chosen experts and their shares (kernels/router.py).

vLLM takes three launches: two for the product, and `topk_softmax`. Here the router layer returns routes in place of
logits, and `SparkMxfp4MoEMethod` takes the routes as vLLM's monolithic methods take logits. Above 16 tokens the same
operator runs vLLM's kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import vllm_topk_softmax
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from spark_mxfp4.kernels.router import MOST_TOKENS, choose, empty_table, fits, route

logger = init_logger(f"vllm.{__name__}")


@cache
def replace_routers() -> None:
    """Make routers return routes in models with our quantization; other models keep vLLM's layer.

    vLLM's hook for this is `register_oot`: it instantiates the registered class in place of GateLinear.
    """

    @GateLinear.register_oot(name="GateLinear")
    class SparkGateLinear(GateLinear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            config = get_current_vllm_config()
            self.routed = getattr(config.quant_config, "routed", False)
            if self.routed:
                self.top_k = config.model_config.hf_text_config.num_experts_per_tok
                logger.info_once("Routers of up to %s tokens run in one launch.", MOST_TOKENS, scope="process")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the routes of `x` [M, H], float32 [2, M, k]; logits [M, E] without our quantization."""
            if not self.routed:
                return super().forward(x)
            if x.device.type == "cuda":
                return router_operator(x, self.weight, self.bias, self.top_k)
            routes = choose(super().forward(x), self.top_k)
            return torch.stack([routes.shares, routes.ids.view(torch.float32)])


@torch.library.custom_op("spark_mxfp4::router", mutates_args=())
def router_operator(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """Return the routes of `x` [M, H] (float32 [2, M, k], see `kernels.router.Routes.of`), as `spark_mxfp4::router`."""
    tokens = x.shape[0]
    if x.dtype == torch.bfloat16 and fits(tokens, weight, top_k):
        return route(x, weight, bias, top_k, _padding(tokens))
    table = empty_table(tokens, top_k, x.device)
    ids = table[1].view(torch.int32)
    logits = torch.nn.functional.linear(x, weight, bias)
    vllm_topk_softmax(table[0], ids, torch.empty_like(ids), logits, renormalize=True)
    return table


@router_operator.register_fake
def _shape(x: torch.Tensor, _weight: object, _bias: object, top_k: int) -> torch.Tensor:
    return empty_table(x.shape[0], top_k, x.device)


def _padding(tokens: int) -> torch.Tensor | None:
    """Return the mask of tokens that only pad the step for a CUDA graph, as in vLLM's router; None means no mask."""
    if not (envs.VLLM_MOE_SKIP_PADDING and is_forward_context_available()):
        return None
    padding: torch.Tensor | None = get_forward_context().is_padding
    return None if padding is None else padding[:tokens]


def refuse_unsupported(layer: Any) -> None:
    """Raise NotImplementedError, with the reason, if routes cannot replace logits."""
    parallel = layer.moe_config.moe_parallel_config
    refusals = {
        "data parallel experts": parallel.dp_size > 1,
        "sequence parallel experts": layer.moe_config.is_sequence_parallel,
        "prefill context parallelism": layer.moe_config.pcp_size > 1,
        f"the scoring function {layer.scoring_func!r}": layer.scoring_func != "softmax",
        "shares that do not add up to 1": not layer.renormalize,
        "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
    }
    for name, present in refusals.items():
        if present:
            raise NotImplementedError(
                f"SPARK_MXFP4_ROUTER=fused cannot route this model · its kernel does not support {name} · unset it"
            )
