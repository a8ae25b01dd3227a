"""How vLLM 0.32.0 loads and runs one layer's experts with one of our kernels."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from spark_mxfp4.experts import ExpertWeights, Projection
from spark_mxfp4.mxfp4 import BLOCK, BLOCK_BYTES, dequantize
from spark_mxfp4.registry import Kernel, load

# Loggers outside the "vllm" tree have no handler in a server.
logger = init_logger(f"vllm.{__name__}")

PROJECTIONS = ("w13", "w2")


class SparkMxfp4MoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """MXFP4 experts of gpt-oss: weights stay packed, or are dequantised once after loading."""

    weight_dtype = "gpt_oss_mxfp4"  # gpt_oss.py then loads expert by expert without unpacking

    def __init__(self, layer: Any, kernel: Kernel, mode: str) -> None:
        super().__init__(layer.moe_config)
        _refuse_unsupported(layer)
        self.kernel, self.mode = kernel, mode
        self._weights: ExpertWeights | None = None
        logger.info_once("Using 'SPARK_%s' Mxfp4 MoE backend (%s).", kernel.name.upper(), mode)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Return hidden and intermediate size, rounded up as the all-to-all and then as our kernel need."""
        return self.kernel.padded(
            *super().maybe_roundup_sizes(hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config)
        )

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the packed weights, scales and biases, zero where padding stays: 4.25 bits a weight."""
        self.dtype = params_dtype
        gate_up = (2 * intermediate_size_per_partition, hidden_size)
        for name, (rows, columns) in zip(PROJECTIONS, (gate_up, (hidden_size, gate_up[0] // 2)), strict=True):
            parameters = {
                f"{name}_weight": torch.zeros(num_experts, rows, columns // 2, dtype=torch.uint8),
                f"{name}_weight_scale": torch.zeros(num_experts, rows, columns // BLOCK, dtype=torch.uint8),
            }
            if self.moe.has_bias:
                parameters[f"{name}_bias"] = torch.zeros(num_experts, rows, dtype=torch.bfloat16)
            for full_name, zeros in parameters.items():
                parameter = torch.nn.Parameter(zeros, requires_grad=False)
                layer.register_parameter(full_name, parameter)
                set_weight_attrs(parameter, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Give biases the model's dtype; in `dequant` mode replace the packed weights by dense ones."""
        for name in PROJECTIONS:
            if hasattr(layer, f"{name}_bias"):
                replace_parameter(layer, f"{name}_bias", getattr(layer, f"{name}_bias").data.to(self.dtype))
            if self.mode == "dequant":
                replace_parameter(layer, f"{name}_weight", _dense(layer, name, self.dtype))
                delattr(layer, f"{name}_weight_scale")
        self._weights = ExpertWeights(*(_projection(layer, name) for name in PROJECTIONS))

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:  # noqa: ARG002 (vLLM's signature)
        """Return None: vLLM's modular kernels are not used."""
        return

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,  # noqa: ARG002 (gpt-oss has none)
        shared_experts_input: torch.Tensor | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the routed experts' output [T, H] for `x` [T, H]."""
        if torch.compiler.is_compiling():  # on CPUs vLLM traces into this method
            gate_up, down = (_projection(layer, name) for name in PROJECTIONS)
            name = self.kernel.name
            opaque: torch.Tensor = _opaque_moe(x, *gate_up, *down, topk_ids, topk_weights, layer.expert_map, name)
            return opaque
        weights = self._weights or ExpertWeights(*(_projection(layer, name) for name in PROJECTIONS))
        return self.kernel.function(x, weights, topk_ids, topk_weights, layer.expert_map)


@torch.library.custom_op("spark_mxfp4::moe", mutates_args=())
def _opaque_moe(  # noqa: PLR0913, PLR0917 (an operator takes tensors, not tuples of them)
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
    kernel: str,
) -> torch.Tensor:
    """Run a kernel by name as one operator that torch.compile does not look into: which experts are hit is data."""
    weights = ExpertWeights(Projection(gate_up, gate_up_scales, gate_up_bias), Projection(down, down_scales, down_bias))
    return load(kernel).function(x, weights, topk_ids, topk_weights, expert_map)


@_opaque_moe.register_fake
def _opaque_moe_shape(x: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(x)


def _refuse_unsupported(layer: Any) -> None:
    """Raise NotImplementedError, by name, for what the kernels do not do."""
    moe = layer.moe_config
    refusals = {
        "LoRA (--enable-lora)": moe.is_lora_enabled,
        f"the activation {moe.activation.value!r}": moe.activation != MoEActivation.SWIGLUOAI,
        "router weights applied to the input": layer.apply_router_weight_on_input,
    }
    for name, present in refusals.items():
        if present:
            raise NotImplementedError(
                f"spark-mxfp4 cannot serve this model · its kernels do not support {name} · "
                "leave it out, or use another quantization backend"
            )


def _dense(layer: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise one projection of all experts, expert by expert so that the peak is one expert above the result."""
    packed, scales = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
    experts, rows, columns = packed.shape
    dense = torch.empty(experts, rows, 2 * columns, dtype=dtype, device=packed.device)
    for expert in range(experts):
        dense[expert] = dequantize(packed[expert].view(*scales.shape[1:], BLOCK_BYTES), scales[expert], dtype)
    return dense


def _projection(layer: torch.nn.Module, name: str) -> Projection:
    weight, scales, bias = (getattr(layer, name + suffix, None) for suffix in ("_weight", "_weight_scale", "_bias"))
    if weight is None:
        raise ValueError(f"the layer has no {name}_weight · its weights were not created · load the model first")
    return Projection(weight, scales, bias)
