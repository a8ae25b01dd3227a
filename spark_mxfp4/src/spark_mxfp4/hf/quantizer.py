"""A quantizer for transformers 5.19, which loads a gpt-oss checkpoint into our modules and keeps the experts' bytes."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from spark_mxfp4 import registry
from spark_mxfp4.hf.experts import ExpertSizes, PackedExperts

NAME = "spark-mxfp4"
# Modules that stay unquantized, as openai/gpt-oss' config.json names them.
KEPT_DENSE = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


class PackedConfig(QuantizationConfigMixin):
    """Selects our experts at load; a saved config.json has the stock method `mxfp4`."""

    def __init__(self, kernel: str = registry.DEFAULT_KERNEL, **_: Any) -> None:
        self.quant_method = NAME
        self.kernel = kernel

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a stock gpt-oss checkpoint for config.json, which every loader reads."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(KEPT_DENSE)}


class PackedQuantizer(HfQuantizer):
    """Puts `PackedExperts` into the empty model. Parameters have the checkpoint's names, so nothing is converted."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        kernel = registry.load(self.quantization_config.kernel)
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, GptOssExperts)]
        for name, experts in layers:
            sizes = ExpertSizes(experts.num_experts, experts.hidden_size, experts.intermediate_size)
            dtype = experts.gate_up_proj_bias.dtype
            model.set_submodule(name, PackedExperts(sizes, kernel, dtype, torch.device("meta")))
        return model

    def is_serializable(self) -> bool:
        """Tell transformers that `save_pretrained` works, because the state dict has the checkpoint's tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Tell transformers that packed weights are not trained."""
        return False


def register() -> None:
    """Register configuration and quantizer with transformers; may be called any number of times."""
    if NAME not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(NAME)(PackedConfig)
        register_quantizer(NAME)(PackedQuantizer)
