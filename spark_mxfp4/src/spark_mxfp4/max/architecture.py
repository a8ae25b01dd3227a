"""MAX's gpt-oss with experts that stay packed, for `max serve --custom-architectures`.

`quantization_format`, a field of the model's config.json, is `packed` (the default) or `dequant`. `packed` expands
experts in registers. `dequant` is MAX's own path, which expands all experts of a layer to bfloat16 in memory at every
step. The variable SPARK_MXFP4_QUANTIZATION_FORMAT overrides the field.
On a GPU MAX routes and sums, and `spark_mxfp4.grouped_matmul` multiplies. MAX's dense products write past the end of a
bfloat16 result, so here their result is float32, which `spark_mxfp4.add_and_round` rounds. On a CPU, where MAX has no
kernels for routing, `spark_mxfp4.moe` computes the whole layer in float32, for tests and small models.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

try:
    from max.driver import Buffer
except ImportError as error:
    raise type(error)(
        f"spark_mxfp4.max cannot be used · {error} · pip install 'spark-mxfp4[max]'", name=error.name
    ) from error
import numpy as np
from max.dtype import DType
from max.graph import BufferType, BufferValue, DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.graph import Module as GraphModule
from max.graph.weights import WeightData
from max.nn.kernels import flash_attention_ragged
from max.nn.layer import Module
from max.nn.linear import Linear
from max.nn.moe import GateUpFormat, StackedMoE
from max.nn.stacked_linear import StackedLinear
from max.pipelines.architectures.gpt_oss import gpt_oss
from max.pipelines.architectures.gpt_oss.arch import gpt_oss_arch
from max.pipelines.architectures.gpt_oss.layers import attention, transformer_block
from max.pipelines.architectures.gpt_oss.layers.moe import GptOssMoE, GptOssMoEGate, gptoss_glu_activation
from max.pipelines.architectures.gpt_oss.memory_planner import GptOssMemoryPlanner
from max.pipelines.architectures.gpt_oss.model import GptOssModel
from max.pipelines.architectures.gpt_oss.model_config import GptOssConfig
from max.pipelines.lib.graph_specs import GraphSpec

from spark_mxfp4.max import versions

versions.require_version()
versions.require_signature(GptOssMoE, "__init__", "self", "config", "is_sharding")
versions.require_signature(GptOssMoE, "_forward_quantized", "self", "permuted_states", "routing")
versions.require_signature(GptOssMoE, "_init_mxfp4_weights", "self")
versions.require_signature(GptOssModel, "graph_specs", "self", "model_config")
versions.require_signature(GptOssModel, "_load_state_dict", "self")
versions.require_signature(
    GptOssMemoryPlanner, "estimate_activation_memory", "self", "pipeline_config", "huggingface_config"
)
versions.require_signature(GptOssConfig, "initialize", "pipeline_config", "model_config", "max_seq_len")
versions.require_signature(GptOssConfig, "finalize", "self", "huggingface_config", "state_dict", "return_logits")
versions.require_signature(transformer_block.Allreduce, "__init__", "self", "num_accelerators")
versions.require_signature(gpt_oss, "signal_inputs", "device_refs")
versions.require_signature(GraphSpec, "trace", "self", "module")
versions.require_signature(Linear, "__call__", "self", "x")
versions.require_signature(StackedLinear, "__call__", "self", "x")
versions.require_signature(
    attention, "flash_attention_ragged", "kv_params", "input", "input_row_offsets", "kv_collection", "layer_idx",
    "mask_variant", "scale", "local_window_size", "sink_weights", "rel_logits", "output_dtype",
)  # fmt: skip

KERNELS = Path(__file__).parent / "kernels"
BLOCK = 32  # elements that share a scale
SETTING, FIELD = "SPARK_MXFP4_QUANTIZATION_FORMAT", "quantization_format"
PACKED, DEQUANT = FORMATS = ("packed", "dequant")
ATTENTION_KEYS = 128  # keys that MAX's CPU attention handles at a time; it adds the sink once for each such block
# Activations of a step and fragmentation of MAX's memory manager: MAX's own plan has 6 GiB for both. For MXFP4 MAX adds
# 15 GiB and the experts in bfloat16, which are not needed here because nothing is expanded in memory.
RESERVED_BYTES = 6 * 1024**3
COLUMNS = 32  # on Hopper MAX's products are wrong unless the columns are a multiple of 8; 32 was tested
LINEAR, STACKED_LINEAR = Linear.__call__, StackedLinear.__call__  # MAX's own


def quantization_format(config: object) -> str:
    """Return the format from the variable, else from a checkpoint's `config`. Raises ValueError for an unknown one."""
    stored = getattr(config, FIELD, PACKED)
    origin, name = (SETTING, os.environ[SETTING]) if SETTING in os.environ else (FIELD, stored)
    if name not in FORMATS:
        given = f"{origin}={str(name)[:40]}"
        raise ValueError(f"{given} is unknown · the formats are {', '.join(FORMATS)} · set one of them")
    return str(name)


def in_pairs(x: TensorValue) -> TensorValue:
    """Return `x` [P, K] with every eight columns in the order 0 4 1 5 2 6 3 7, as the kernels expect."""
    rows, columns = x.shape
    return ops.reshape(ops.transpose(ops.reshape(x, [rows, int(columns) // 8, 2, 4]), 2, 3), [rows, columns])


def product(x: TensorValue, weight: TensorValue, bias: TensorValue) -> TensorValue:
    """Return `x` [P, K] times `weight` [N, K] transposed plus `bias` [N], all bfloat16.

    MAX's product with a bfloat16 result writes whole tiles of 128 rows past the end of the result, over other
    operations' data. With a fused cast the product stays within its result (docs/max.md).
    """
    rows, columns = (int(size) for size in weight.shape)
    if padding := -rows % COLUMNS:
        zeros = ops.broadcast_to(ops.constant(0.0, weight.dtype, device=weight.device), [padding, columns])
        weight = ops.concat([weight, zeros])
    sums = ops.cast(x @ weight.T, DType.float32)
    values = [sums[:, :rows] if padding else sums, bias]
    result = TensorType(DType.bfloat16, [x.shape[0], rows], x.device)
    return ops.custom("spark_mxfp4.add_and_round", x.device, values, [result])[0].tensor


def _linear(layer: Linear, x: TensorValue) -> TensorValue:
    """Return what Linear returns. The LM head has no bias, and MAX computes its product in float32."""
    if x.dtype != DType.bfloat16 or layer.bias is None:
        return LINEAR(layer, x)
    return product(x, layer.weight.to(x.device), layer.bias.to(x.device))


def _stacked_linear(layer: StackedLinear, x: TensorValue) -> TensorValue:
    """Return what StackedLinear returns: queries, keys and values from one product."""
    bias = layer.stacked_bias
    if x.dtype != DType.bfloat16 or bias is None:
        return STACKED_LINEAR(layer, x)
    return product(x, layer.stacked_weight.to(x.device), bias.to(x.device))


class PackedMoE(GptOssMoE):
    """The experts of a layer: blocks u8 [E, N, K/2] and scales u8 [E, N, K/32], as the checkpoint has them."""

    def __init__(self, config: GptOssConfig, is_sharding: bool = False) -> None:
        """Do the same as GptOssMoE, whose __init__ takes no dtype for the router."""
        self.config = config
        StackedMoE.__init__(
            self,
            devices=config.devices,
            hidden_dim=config.hidden_size,
            num_experts=config.num_local_experts,
            num_experts_per_token=config.num_experts_per_tok,
            moe_dim=config.intermediate_size,
            gate_cls=GptOssMoEGate,
            dtype=config.dtype,
            gate_up_format=GateUpFormat.INTERLEAVED,
            gated_activation_fn=gptoss_glu_activation,
            has_bias=True,
            quant_config=config.quant_config,
            router_dtype=config.dtype if config.devices[0].is_cpu() else None,
            is_sharding=is_sharding,
        )

    def _init_mxfp4_weights(self) -> None:
        def weight(name: str, rows: int, columns: int) -> Weight:
            return Weight(f"experts.{name}", DType.uint8, [self.num_experts, rows, columns], self.devices[0])

        hidden, inner = self.hidden_dim, self.moe_dim
        self._gate_up_weight = weight("gate_up_proj", 2 * inner, hidden // 2)
        self._gate_up_scale = weight("gate_up_proj_scale", 2 * inner, hidden // BLOCK)
        self._down_weight = weight("down_proj", hidden, inner // 2)
        self._down_scale = weight("down_proj_scale", hidden, inner // BLOCK)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Return the experts' weighted sum [T, H] for `x` [T, H]."""
        if not self.devices[0].is_cpu():
            return super().__call__(x)
        experts, routing = self.gate(x)
        values = [
            x, ops.cast(experts, DType.int32), routing, self._gate_up_weight, self._gate_up_scale,
            self._gate_up_bias, self._down_weight, self._down_scale, self._down_bias,
        ]  # fmt: skip
        return ops.custom("spark_mxfp4.moe", DeviceRef.CPU(), values, [x.type])[0].tensor

    def _forward_quantized(self, permuted_states: TensorValue, routing: Any) -> TensorValue:
        def product(x: TensorValue, columns: int, swiglu: bool, *weights: Weight) -> TensorValue:
            result = TensorType(x.dtype, [x.shape[0], columns], x.device)
            values = [x, *weights, routing.expert_start_indices, routing.expert_ids]
            name = "spark_mxfp4.grouped_matmul"
            return ops.custom(name, x.device, values, [result], parameters={"swiglu": swiglu})[0].tensor

        hidden = product(
            in_pairs(permuted_states), self.moe_dim, True, self._gate_up_weight, self._gate_up_scale, self._gate_up_bias
        )
        return product(hidden, self.hidden_dim, False, self._down_weight, self._down_scale, self._down_bias)


@dataclasses.dataclass(kw_only=True)
class PackedGptOssConfig(GptOssConfig):
    """The configuration of gpt-oss with a `quantization_format`. On a CPU everything but the experts is float32."""

    quant_config: Any = None
    quantization_format: str = PACKED
    SUPPORTED_ENCODINGS: ClassVar[set[Any]] = {*GptOssConfig.SUPPORTED_ENCODINGS, "float32"}

    @classmethod
    def initialize(cls, pipeline_config: Any, model_config: Any = None, *, max_seq_len: int) -> Any:
        """Return MAX's configuration. Raises ValueError for devices that the format does not run on."""
        config = super().initialize(pipeline_config, model_config, max_seq_len=max_seq_len)
        model = model_config or pipeline_config.model
        config.quantization_format = quantization_format(model.huggingface_config)
        if config.quantization_format == DEQUANT:
            if config.devices[0].is_cpu():
                why = f"MAX's own experts have no CPU kernels · {DEQUANT} needs a GPU"
                raise ValueError(f"{why} · set {SETTING}={PACKED}")
            return config
        if len(config.devices) > 1:
            raise ValueError(
                f"{len(config.devices)} devices were given · tensor parallelism of packed experts is not built · "
                f"give one device, or set {SETTING}=dequant"
            )
        return config

    def finalize(self, huggingface_config: Any, state_dict: Mapping[str, WeightData], return_logits: Any) -> None:
        """Refuse experts that are not MXFP4, and attention without biases, whose products `_linear` leaves to MAX."""
        super().finalize(huggingface_config, dict(state_dict), return_logits)
        if self.quantization_format == DEQUANT:
            return
        if self.quant_config is None:
            raise ValueError(
                f"the checkpoint's experts are not MXFP4 · packed experts need its blocks and scales · "
                f"set {SETTING}=dequant"
            )
        if not self.attention_bias:
            raise ValueError(
                f"the checkpoint's attention has no biases · gpt-oss' has, and nothing else is built · "
                f"set {SETTING}=dequant"
            )
        if self.devices[0].is_cpu():
            self.quant_config = dataclasses.replace(self.quant_config, embedding_output_dtype=None)


class PackedModel(GptOssModel):
    """MAX's model with `PackedMoE`; on a CPU without the parts that need a GPU."""

    model_config_cls: ClassVar[type[Any]] = PackedGptOssConfig

    def _create_model_config(self, state_dict: dict[str, Any]) -> GptOssConfig:
        config = PackedGptOssConfig.initialize(self.pipeline_config, max_seq_len=self.max_seq_len)
        config.finalize(self.huggingface_config, state_dict, self.return_logits)
        return config

    def _load_state_dict(self) -> dict[str, Any]:
        weights = super()._load_state_dict()
        if quantization_format(self.huggingface_config) == PACKED:
            stored = _float32 if _is_cpu(self.devices) else _bytes
            weights = self._language_weights_dict = {name: stored(data) for name, data in weights.items()}
        return weights

    @property
    def signal_buffers(self) -> list[Buffer]:
        """Return one byte for each device on a CPU, because nothing is reduced there; otherwise MAX's own buffers."""
        if _is_cpu(self.devices):
            return [Buffer(DType.uint8, [1]) for _ in self.devices]
        return list(super().signal_buffers)

    def graph_specs(self, model_config: GptOssConfig) -> dict[str, GraphSpec]:
        """Return the decoder's graph, built from our experts."""
        if getattr(model_config, FIELD, PACKED) == DEQUANT:
            return dict(super().graph_specs(model_config))
        on_cpu = _is_cpu(self.devices)
        if on_cpu and self.max_batch_size != 1:
            raise ValueError(
                f"batches of {self.max_batch_size} sequences were asked for · on a CPU a sink is corrected by the "
                f"length of one sequence · give --max-batch-size 1"
            )
        with _replaced((gpt_oss, "GptOssMoE", PackedMoE), *(_CPU_CLASSES if on_cpu else ())):
            specs = super().graph_specs(model_config)
        kind = _CpuGraphSpec if on_cpu else _GpuGraphSpec
        return {
            role: kind(**{**_fields(spec), "custom_extensions": [*spec.custom_extensions, KERNELS]})
            for role, spec in specs.items()
        }


class PackedPlanner(GptOssMemoryPlanner):
    """The memory of a step's activations: MAX's own plan, or a plan without experts in bfloat16."""

    def estimate_activation_memory(self, pipeline_config: Any, huggingface_config: Any) -> int:
        """Return the bytes to keep free of weights and KV cache."""
        if quantization_format(huggingface_config) == PACKED:
            return RESERVED_BYTES
        return int(super().estimate_activation_memory(pipeline_config, huggingface_config))


class _Unreduced(Module):
    """Replaces Allreduce, which opens an accelerator even for one device."""

    def __init__(self, num_accelerators: int) -> None:  # noqa: ARG002 - Allreduce's
        super().__init__()

    def __call__(
        self,
        inputs: Iterable[TensorValue],
        signal_buffers: Iterable[BufferValue],  # noqa: ARG002 - Allreduce's
    ) -> list[TensorValue]:
        return list(inputs)


def _byte_signals(device_refs: list[DeviceRef]) -> dict[str, tuple[BufferType, ...]]:
    return {"signal": tuple(BufferType(DType.uint8, [1], device) for device in device_refs)}


_CPU_CLASSES = ((transformer_block, "Allreduce", _Unreduced), (gpt_oss, "signal_inputs", _byte_signals))


@dataclasses.dataclass(frozen=True)
class _CpuGraphSpec(GraphSpec):
    """A graph whose attention counts each sink once."""

    def trace(self, module: GraphModule | None = None) -> Graph:
        with _replaced((attention, "flash_attention_ragged", _attend)):
            return super().trace(module)


@dataclasses.dataclass(frozen=True)
class _GpuGraphSpec(GraphSpec):
    """A graph whose dense products stay within their results."""

    def trace(self, module: GraphModule | None = None) -> Graph:
        with _replaced((Linear, "__call__", _linear), (StackedLinear, "__call__", _stacked_linear)):
            return super().trace(module)


def _attend(kv_params: Any, *, sink_weights: TensorValue, **arguments: Any) -> TensorValue:
    """Return MAX's attention with lowered sinks, because its CPU version counts each sink several times.

    The CPU version adds e^sink to the softmax's sum for each of the n blocks of 128 keys of a sequence (see
    tests/max/sinks.py). Sinks are lowered by ln n, because n · e^(sink - ln n) is e^sink.
    """
    cached, tokens = arguments["kv_collection"].cache_lengths, ops.shape_to_tensor(arguments["input"].shape)[0]
    keys = ops.cast(cached[0], DType.float32) + ops.cast(tokens, DType.float32)
    runs = ops.floor((keys + (ATTENTION_KEYS - 1)) / ATTENTION_KEYS)
    return flash_attention_ragged(kv_params, sink_weights=sink_weights - ops.log(runs), **arguments)


@contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace names in MAX's modules, so that MAX's model builds its graph from our parts."""
    former = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    try:
        for module, name, value in replacements:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in former:
            setattr(module, name, value)


def _fields(spec: GraphSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _is_cpu(devices: Iterable[Any]) -> bool:
    return all(device.is_host for device in devices)


def _bytes(data: WeightData) -> WeightData:
    """Return scales as raw bytes, which the kernels shift; return other weights unchanged."""
    return dataclasses.replace(data, dtype=DType.uint8) if data.dtype == DType.float8_e8m0fnu else data


def _float32(data: WeightData) -> WeightData:
    """Return a bfloat16 weight as float32; others as `_bytes` does."""
    if data.dtype != DType.bfloat16:
        return _bytes(data)
    shape = [int(size) for size in data.shape]
    bits = data.to_buffer().view(DType.uint16, shape).to_numpy().astype(np.uint32) << 16
    return WeightData.from_numpy(bits.view(np.float32), data.name)


ARCHITECTURES = [  # MAX registers this architecture in place of its own of the same name
    dataclasses.replace(
        gpt_oss_arch,
        pipeline_model=PackedModel,
        config=PackedGptOssConfig,
        supported_encodings=PackedGptOssConfig.SUPPORTED_ENCODINGS,
        memory_planner=PackedPlanner,
    )
]
