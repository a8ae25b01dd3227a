"""vLLM's norms with a residual, in one launch (kernels/norm.py), which can also replace the all-reduce before it.

With tensor parallelism on one host, each norm with a residual in vLLM's gpt-oss follows an all-reduce of attention's or
the experts' output. Here those layers skip the all-reduce, and the norm adds the ranks' partial results. For more
tokens than the norm's kernel takes, the same operator runs vLLM's all-reduce.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear

from spark_mxfp4.kernels import attention, norm

logger = init_logger(f"vllm.{__name__}")


@cache
def replace_norms() -> None:
    """Replace vLLM's RMSNorm by one that runs a norm with a residual in one launch (`register_oot`, vLLM's API)."""

    @RMSNorm.register_oot(name="RMSNorm")
    class SparkRMSNorm(RMSNorm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fused = (
                getattr(get_current_vllm_config().quant_config, "fused_attention", False)
                and self.has_weight
                and self.variance_size_override is None
                and self.weight.dtype == torch.bfloat16
                and self.hidden_size % 8 == 0
                and self.hidden_size <= norm.MOST_COLUMNS
            )
            self.reduces = get_current_vllm_config().quant_config.reduces if self.fused else False

        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            """Return the norm of `x` [M, H]; with `residual` [M, H], the norm of their sum, and the sum."""
            if not self.fused or residual is None or x.device.type != "cuda":
                return super().forward(x, residual)
            add = reduce_add_rms_norm if self.reduces else norm.add_rms_norm
            return add(x, residual, self.weight, self.variance_epsilon)


def obstacle(config: VllmConfig) -> str:
    """Return why this engine's norms cannot add the ranks' parts; the empty string if they can."""
    quantization: Any = config.quant_config
    parallel, model, columns = config.parallel_config, config.model_config, config.model_config.get_hidden_size()
    communicator = getattr(get_tp_group().device_communicator, "ca_comm", None)
    spread = parallel.enable_expert_parallel or parallel.pipeline_parallel_size > 1 or config.speculative_config
    ours = (
        quantization.fused_attention
        and model.dtype == torch.bfloat16
        and columns % 8 == 0
        and columns <= norm.MOST_COLUMNS
    )
    reasons = {
        "there is one rank": parallel.tensor_parallel_size == 1,
        "there are pipeline stages, experts of one rank, or a draft": spread,
        "no kernels are compiled for this device": not attention.device_fits(get_tp_group().device),
        "attention and norms are vLLM's": not ours,
        "vLLM's custom all-reduce, which shares memory between GPUs, is off": not communicator or communicator.disabled,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@cache
def ranks() -> norm.Ranks | None:
    """Create this rank's inbox and return all inboxes; None if norms do not add parts. All ranks call it together."""
    config = get_current_vllm_config()
    if why := obstacle(config):
        logger.info_once("vLLM adds the ranks' parts: %s.", why, scope="process")
        return None
    group = get_tp_group()
    size = norm.inbox_bytes(group.world_size, config.model_config.get_hidden_size())
    boxes = CustomAllreduce.create_shared_buffer(size, group=group.cpu_group)  # zeros
    buffers = torch.zeros(norm.MOST_TOKENS, dtype=torch.int32, device=group.device)
    # vLLM hashes additional_config into the key of its compile cache. The traced graph depends on this setting.
    if isinstance(extra := config.additional_config, dict):
        extra["spark_mxfp4:reduction"] = group.world_size
    logger.info_once("Norms of up to %s tokens add the ranks' parts.", norm.MOST_TOKENS, scope="process")
    return norm.Ranks(torch.tensor(boxes, dtype=torch.int64, device=group.device), buffers, group.rank_in_group)


@cache
def leave_sums_open() -> None:
    """Make attention's output projections return this rank's partial result (`register_oot`, vLLM's API).

    Call this before the first projection is created. Experts get `skip_final_all_reduce` from their method.
    """
    if ranks() is None:
        return
    replace_norms()  # with any attention backend

    @RowParallelLinear.register_oot(name="RowParallelLinear")
    class SparkRowParallelLinear(RowParallelLinear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.reduce_results = False


@torch.library.custom_op("spark_mxfp4::reduce_add_rms_norm", mutates_args=())
def reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum of all ranks' `x` [M, H] and the residual, and that sum; see `kernels.norm`."""
    if x.shape[0] <= norm.MOST_TOKENS and (group := ranks()):
        return norm.reduce_add_rms_norm(x, residual, weight, epsilon, group)
    return norm.add_rms_norm(tensor_model_parallel_all_reduce(x), residual, weight, epsilon)


@reduce_add_rms_norm.register_fake
def _shapes(x: torch.Tensor, _residual: object, _weight: object, _epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
