"""vLLM's methods for dense layers (attention's projections, LM head) with weights in 4 or 8 bits.

The checkpoint's bf16 weights are quantised once after loading. On CUDA `kernels.linear` multiplies by them. On a CPU
they are dequantised again and vLLM multiplies: a reference with the rounded values, at the speed and memory of bf16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from spark_mxfp4.kernels.linear import MOST_TOKENS, Format, Weight, product, reference
from spark_mxfp4.mxfp4 import BLOCK
from spark_mxfp4.vllm.formats import AS_STORED, HEAD_VARIABLE, LINEAR_VARIABLE

logger = init_logger(f"vllm.{__name__}")


@register_weight_loader_v2_supported_method
class SparkLinearMethod(LinearMethodBase):
    """A linear layer whose bf16 weights become `format_` after loading.

    On CUDA `layer.weight` is then u8 [tiles, chunks, bytes] in the kernel's order, with `layer.row_scales` (float32,
    FP8 only). On a CPU it is the dequantised matrix [N, K] in the model's dtype.
    """

    def __init__(self, format_: Format, variable: str, name: str) -> None:
        self.format, self.variable, self.name = format_, variable, name
        self.stored: UnquantizedLinearMethod | UnquantizedEmbeddingMethod = UnquantizedLinearMethod()
        # A traced graph depends on these settings. vLLM's configuration lacks them, so add them to the key of its
        # compile cache.
        if isinstance(extra := get_current_vllm_config().additional_config, dict):
            extra[f"spark_mxfp4:{variable}"] = format_.name

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register this rank's share of the bf16 weight. Raises ValueError for a share that the format cannot hold."""
        if input_size_per_partition % BLOCK:
            raise self._refusal(
                f"a device's share has {input_size_per_partition} columns, which is no multiple of {BLOCK}",
                "use fewer devices, or",
            )
        self.stored.create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip
        if _runs_our_kernels(layer.weight) and params_dtype != torch.bfloat16:
            raise self._refusal(f"the kernels take bfloat16, and the model runs in {params_dtype}", "--dtype bfloat16;")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantise the loaded weight. Raises ValueError with the layer's name for values that do not fit."""
        matrix = layer.weight.data
        self.rows, self.columns = matrix.shape
        on_cuda = _runs_our_kernels(matrix)
        try:
            packed = Weight.pack(matrix, self.format) if on_cuda else None
        except ValueError as error:
            raise self._refusal(str(error).partition(" · keep")[0], "") from error
        # Set a new parameter: a tied head shares its old one with the embedding, which replace_parameter might
        # overwrite.
        if packed is None:
            layer.weight = _frozen(reference(matrix, self.format).to(matrix.dtype))
            self.stored.process_weights_after_loading(layer)
        else:
            layer.weight = _frozen(packed.data)
            if packed.row_scales is not None:
                layer.register_buffer("row_scales", packed.row_scales, persistent=False)
        runs = "by our kernels" if on_cuda else "as a reference: dequantised, no faster than bf16"
        logger.info_once("Dense layers (%s) are %s, %s.", self.variable, self.format.name, runs, scope="process")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x` [..., K] times the transposed weight, plus `bias` [N]: [..., N]."""
        if layer.weight.dtype != torch.uint8:
            return self.stored.apply(layer, x, bias)
        return self._product(layer, x.flatten(0, -2), bias).view(*x.shape[:-1], self.rows)

    def _product(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scales = getattr(layer, "row_scales", None)
        return product(x, layer.weight, scales, bias, int(self.format), (self.rows, self.columns))

    def _refusal(self, why: str, fix: str) -> ValueError:
        text = f"{self.name} cannot be served in {self.format.name} · {why} · {fix} unset {self.variable}"
        return ValueError(" ".join(text.split()))


class SparkHeadMethod(SparkLinearMethod):
    """The same for an LM head, whose weight is too large to expand. Above MOST_TOKENS a step takes several products."""

    def __init__(self, format_: Format, variable: str, name: str) -> None:
        super().__init__(format_, variable, name)
        self.stored = UnquantizedEmbeddingMethod()

    def _product(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts = [super(SparkHeadMethod, self)._product(layer, part, bias) for part in x.split(MOST_TOKENS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _runs_our_kernels(weight: torch.Tensor) -> bool:
    return weight.device.type == "cuda"


def linear_method(format_name: str, prefix: str) -> LinearMethodBase:
    """Return vLLM's method of a linear layer for a format of `formats.FORMATS`."""
    if format_name == AS_STORED:
        return UnquantizedLinearMethod()
    return SparkLinearMethod(Format[format_name.upper()], LINEAR_VARIABLE, prefix)


def head_method(format_name: str, prefix: str) -> SparkHeadMethod | None:
    """Return our method of an LM head for a format of `formats.FORMATS`; None leaves the head to vLLM."""
    return None if format_name == AS_STORED else SparkHeadMethod(Format[format_name.upper()], HEAD_VARIABLE, prefix)


@cache
def show_heads_to_the_configuration() -> None:
    """Pass the model's quantization config to each LM head, which vLLM's gpt_oss.py does not do.

    vLLM's hook for this is `register_oot`: it instantiates the registered class in place of ParallelLMHead.
    """

    @ParallelLMHead.register_oot(name="ParallelLMHead")
    class SparkParallelLMHead(ParallelLMHead):
        def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
            if not args and kwargs.get("quant_config") is None and kwargs.get("quant_method") is None:
                kwargs["quant_config"] = get_current_vllm_config().quant_config
            super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
