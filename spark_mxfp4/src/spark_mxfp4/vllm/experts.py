"""vLLM's methods to load and run a layer's experts with one of our kernels, for gpt-oss and other families."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization import mxfp4 as stock
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.platforms import current_platform

from spark_mxfp4 import operator
from spark_mxfp4.experts import GPT_OSS, Activation, ExpertWeights, Projection, TopK
from spark_mxfp4.kernel import MoeKernel
from spark_mxfp4.mxfp4 import BLOCK, BLOCK_BYTES, dequantize

# Loggers outside the "vllm" tree have no handler in a server.
logger = init_logger(f"vllm.{__name__}")

PROJECTIONS = ("w13", "w2")
STOCK_METHOD = stock.Mxfp4MoEMethod


class SparkMxfp4MoEMethod(FusedMoEMethodBase):
    """MXFP4 experts of gpt-oss: weights stay packed, or are dequantised once after loading."""

    weight_dtype = "gpt_oss_mxfp4"  # makes gpt_oss.py load expert by expert without unpacking

    def __init__(self, moe: Any, kernel: MoeKernel, mode: str, *, routed: bool = False) -> None:
        FusedMoEMethodBase.__init__(self, moe)  # not super(): in the subclass below, that would choose a backend
        self.activation = self.activation_of(moe)
        if self.activation is None or (self.activation != GPT_OSS and not kernel.activations):
            _refuse(f"the activation {moe.activation.value!r}")
        self.routed = routed  # the model's router gives routes, not logits (router.py)
        _refuse_unfit(kernel, mode)
        # A traced graph depends on these settings. vLLM's configuration lacks them, so add them to the key of its
        # compile cache.
        if isinstance(extra := get_current_vllm_config().additional_config, dict):
            extra["spark_mxfp4"] = [kernel.name, mode, *(["routes"] if routed else [])]
        self.kernel, self.mode = kernel, mode
        self._weights: ExpertWeights | None = None
        logger.info_once("Using 'SPARK_%s' Mxfp4 MoE backend (%s).", kernel.name.upper(), mode, scope="process")

    @staticmethod
    def activation_of(moe: Any) -> Activation | None:
        """Return the kernels' activation for the layer; None if the kernels do not support it."""
        return GPT_OSS if moe.activation == MoEActivation.SWIGLUOAI else None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Return hidden and intermediate size, rounded up for the all-to-all and then for our kernel."""
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
        """Register the packed weights, scales and biases, with zeros as padding: 4.25 bits a weight."""
        _refuse_unsupported(layer)
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
        """Convert biases to the model's dtype and weights to the kernel's layout; in `dequant` mode dequantise them."""
        for name in PROJECTIONS:
            if hasattr(layer, f"{name}_bias"):
                replace_parameter(layer, f"{name}_bias", getattr(layer, f"{name}_bias").data.to(self.dtype))
            if self.mode == "dequant":
                replace_parameter(layer, f"{name}_weight", _dense(layer, name, self.dtype))
                delattr(layer, f"{name}_weight_scale")
        weights = ExpertWeights(*(_projection(layer, name) for name in PROJECTIONS))
        if self.mode == "packed":
            prepared = self.kernel.prepare(weights)
            logger.info_once("Experts run on the implementation '%s'.", self.kernel.variant(prepared), scope="process")
            _keep(layer, weights, prepared)
        self._weights = ExpertWeights(*(_projection(layer, name) for name in PROJECTIONS))
        if self.mode == "packed":
            del weights, prepared  # free the replaced memory before the search times kernels
            self.kernel.tune(self._weights)
        if self.routed:
            from spark_mxfp4.kernels import extension, router  # noqa: PLC0415 - needed only if switched on

            if extension.target(device := self._weights.down.weight.device):
                router.load(device)  # compile now, so that neither the first step nor a graph capture waits

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:  # noqa: ARG002 (vLLM's signature)
        """Return None: vLLM's modular kernels are not used."""
        return

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM passes the router's output on unchanged, instead of choosing experts by it."""
        return self.routed

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,  # noqa: ARG002 (vLLM's signature)
    ) -> torch.Tensor:
        """Return the experts' output [T, H]; `router_logits` are the routes of router.py, float32 [2, T, k]."""
        from spark_mxfp4.kernels.router import Routes  # noqa: PLC0415 - needed only if switched on

        routes = Routes.of(router_logits)
        return self.apply(layer, x, routes.shares, routes.ids, None, None)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,  # noqa: ARG002 (vLLM's runner computes them)
        shared_experts_input: torch.Tensor | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the routed experts' output [T, H] for `x` [T, H]."""
        # On CPUs vLLM traces this method. The tensors must then be the layer's parameters, so that they become inputs
        # of the graph.
        prepared = None if torch.compiler.is_compiling() else self._weights
        weights = prepared or ExpertWeights(*(_projection(layer, name) for name in PROJECTIONS))
        chosen = TopK(topk_ids, topk_weights, layer.expert_map)
        return operator.run(self.kernel, x, weights, chosen, self.activation or GPT_OSS)


class SparkFamilyMoEMethod(SparkMxfp4MoEMethod, STOCK_METHOD):  # type: ignore[misc, valid-type]
    """MXFP4 experts of other families than gpt-oss, in place of vLLM's `Mxfp4MoEMethod`.

    Weights are loaded as by vLLM's own method: one tensor of the checkpoint for each expert, all gates before all ups.
    """

    weight_dtype = "mxfp4"
    supports_eplb = supports_pre_processed_weights = False
    mxfp4_backend = None
    chosen: Callable[[], tuple[MoeKernel, str]]  # kernel and mode, see `take_families`

    def __init__(self, moe: Any, activation_key: Any = None) -> None:  # noqa: ARG002 (our activations are bf16)
        super().__init__(moe, *type(self).chosen())

    @staticmethod
    def activation_of(moe: Any) -> Activation | None:
        """Return the parameters of the layer's SwiGLU; None for another activation."""
        limit = math.inf if moe.swiglu_limit is None else moe.swiglu_limit
        if moe.activation == MoEActivation.SILU:
            return Activation(1.0, limit, 0.0)
        if moe.activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
            return Activation(moe.swiglu_alpha or 1.0, limit, moe.swiglu_beta or 0.0)
        return None

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **keywords: Any) -> None:
        """Register the parameters of vLLM's own method, with its loaders."""
        _refuse_unsupported(layer)
        self.dtype = keywords["params_dtype"]
        STOCK_METHOD.create_weights(self, layer, *sizes, **keywords)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Interleave gate and up rows, then continue as for gpt-oss."""
        for suffix in ("_weight", "_weight_scale", "_bias"):
            if (loaded := getattr(layer, f"w13{suffix}", None)) is not None:
                pairs = loaded.data.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
                replace_parameter(layer, f"w13{suffix}", pairs.contiguous())
        super().process_weights_after_loading(layer)


def take_families(chosen: Callable[[], tuple[MoeKernel, str]]) -> None:
    """Replace vLLM's method for MXFP4 experts of families other than gpt-oss; `chosen` returns kernel and mode.

    Fp8Config, DeepSeek V4's configuration and Mxfp4Config all look this method up in the module by its name.
    """
    SparkFamilyMoEMethod.chosen = staticmethod(chosen)
    stock.Mxfp4MoEMethod = SparkFamilyMoEMethod


def _refuse(name: str) -> None:
    raise NotImplementedError(
        f"spark-mxfp4 cannot serve this model · its kernels do not support {name} · "
        "leave it out, or use another quantization backend"
    )


def _refuse_unsupported(layer: Any) -> None:
    """Raise NotImplementedError with the name of a feature that the kernels lack."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    refusals = {
        "LoRA (--enable-lora)": moe.is_lora_enabled,
        "router weights applied to the input": layer.apply_router_weight_on_input,
        # gpt_oss.py's loader gives every rank num_experts // ep_size experts, so the rest would stay empty.
        f"{moe.num_experts} experts spread over {parallel.ep_size} ranks": parallel.use_ep
        and moe.num_experts % parallel.ep_size != 0,
    }
    for name, present in refusals.items():
        if present:
            _refuse(name)


def _refuse_unfit(kernel: MoeKernel, mode: str) -> None:
    """Raise ValueError if the kernel does not support dense weights or CUDA graphs, and the settings require them."""
    if mode == "dequant" and kernel.has_own_layout:
        raise ValueError(
            f"kernel {kernel.name!r} cannot run dense experts · it has its own layout of packed ones · "
            "set SPARK_MXFP4_MODE=packed"
        )
    graphs = get_current_vllm_config().compilation_config.cudagraph_mode
    uses_graphs = current_platform.is_cuda() and graphs is not None and graphs.name != "NONE"
    if uses_graphs and not kernel.cuda_graphs:
        raise ValueError(
            f"kernel {kernel.name!r} cannot be held in CUDA graphs · it waits for the device to learn which experts "
            "are hit · add --enforce-eager, or set SPARK_MXFP4_KERNEL=triton"
        )


def _keep(layer: torch.nn.Module, loaded: ExpertWeights, prepared: ExpertWeights) -> None:
    """Replace the loaded weights by the prepared weights; keep tensors that `prepare` did not change."""
    for name, old, new in zip(PROJECTIONS, loaded, prepared, strict=True):
        for suffix, before, after in zip(("_weight", "_weight_scale", "_bias"), old, new, strict=True):
            if after is not before and after is not None:
                replace_parameter(layer, name + suffix, after)


def _dense(layer: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise one projection of all experts, one at a time, so that temporary tensors have one expert's size."""
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
