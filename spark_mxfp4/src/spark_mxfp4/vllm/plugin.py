"""The vLLM plugin: registers the quantization `spark-mxfp4` (entry point group `vllm.general_plugins`).

The checkpoint keeps `quant_method: mxfp4`. The plugin takes it over if the user selects the plugin, or if stock vLLM
has no backend for it.
"""

from __future__ import annotations

import atexit
import gc
import os
import platform
from typing import Any

import torch
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from spark_mxfp4 import registry
from spark_mxfp4.experts import SWIGLU_ALPHA, SWIGLU_LIMIT
from spark_mxfp4.vllm import formats, versions
from spark_mxfp4.vllm.formats import AS_STORED, HEAD_VARIABLE, LINEAR_VARIABLE

NAME = "spark-mxfp4"
MODEL_TYPE = "gpt_oss"
MODE_VARIABLE = "SPARK_MXFP4_MODE"
MODES = ("packed", "dequant")
ROUTER_VARIABLE = "SPARK_MXFP4_ROUTER"
ATTENTION_VARIABLE = "SPARK_MXFP4_ATTENTION"
REDUCTION_VARIABLE = "SPARK_MXFP4_REDUCTION"
FAMILIES_VARIABLE = "SPARK_MXFP4_FAMILIES"
IMPLEMENTATIONS = ("vllm", "fused")  # of the router, attention, and the sum over ranks
STOCK = "vllm"  # as a kernel's name: the experts are vLLM's own
# `quant_method` of a gpt-oss checkpoint, before and after vLLM's GptOssForCausalLMConfig normalises it.
CHECKPOINT_METHODS = ("mxfp4", "gpt_oss_mxfp4")


def register() -> None:
    """Register `spark-mxfp4` with vLLM; may be called any number of times, in every process."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(SparkMxfp4Config)
        # vLLM freezes imported objects (gc.freeze). Frozen objects are not collected at exit, and Triton's nanobind
        # then reports hundreds of leaked functions at the end of every log.
        atexit.register(gc.unfreeze)
    if (switch := os.environ.get(FAMILIES_VARIABLE) or "off") not in ("on", "off"):
        raise ValueError(f"{FAMILIES_VARIABLE} is {switch!r} · it can be on or off · set or unset it")
    if switch == "on" and os.environ.get(registry.KERNEL_VARIABLE) != STOCK:
        from spark_mxfp4.vllm.experts import take_families  # noqa: PLC0415 - heavy, and needed only if switched on

        take_families(lambda: (registry.load(chosen_kernel()), chosen_mode()))


def chosen_mode() -> str:
    """Return SPARK_MXFP4_MODE, else `packed`; raises ValueError for another value."""
    mode = os.environ.get(MODE_VARIABLE) or MODES[0]
    if mode not in MODES:
        raise ValueError(f"{MODE_VARIABLE} is {mode!r} · it must be one of {', '.join(MODES)} · set or unset it")
    return mode


def fused(variable: str) -> bool:
    """Tell whether `variable` (SPARK_MXFP4_ROUTER and the like) is `fused`, not `vllm`, the default.

    Raises ValueError for another value.
    """
    name = os.environ.get(variable) or IMPLEMENTATIONS[0]
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"{variable} is {name!r} · it must be one of {', '.join(IMPLEMENTATIONS)} · set or unset it")
    return name == "fused"


def chosen_kernel() -> str:
    """Return the name of the experts' kernel. Raises ValueError if it does not exist or cannot run here."""
    name = registry.chosen_name(device_type())
    if name != STOCK:
        registry.load(name)  # refuse a wrong name before gigabytes are read
    elif not stock_has_backend():
        raise ValueError(
            f"{registry.KERNEL_VARIABLE} is {STOCK!r} · vLLM has no MXFP4 experts on a CPU without AMX · unset it"
        )
    return name


def stock_has_backend() -> bool:
    """Tell whether stock vLLM runs MXFP4 experts here: on CPUs only with AMX (fused_moe/experts/cpu_moe.py)."""
    from vllm.platforms import current_platform  # noqa: PLC0415 (plugins load before the platform is settled)

    if not current_platform.is_cpu():
        return True
    return platform.machine().lower() in ("x86_64", "amd64") and torch.cpu._is_amx_tile_supported()  # noqa: SLF001 (vLLM's own test)


def device_type() -> str:
    """Return torch's device type of vLLM's platform. Raises NotImplementedError if our kernels do not run on it."""
    from vllm.platforms import current_platform  # noqa: PLC0415 (plugins load before the platform is settled)

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    raise NotImplementedError(
        f"spark-mxfp4 cannot run on {current_platform.device_name or 'this platform'} · its kernels are for CUDA and "
        "CPUs · leave --quantization out"
    )


def refuse_other_checkpoints(model_type: str | None, method: str | None) -> None:
    """Raise ValueError unless a checkpoint's model type is gpt-oss and its quantization method is MXFP4."""
    if model_type != MODEL_TYPE:
        raise ValueError(
            f"--quantization {NAME} cannot serve this checkpoint · it is a model of type {model_type!r}, not "
            f"{MODEL_TYPE!r} · leave --quantization out"
        )
    if method not in CHECKPOINT_METHODS:
        state = f"its quant_method is {method!r}" if method else "its experts are not quantized"
        raise ValueError(
            f"--quantization {NAME} cannot serve this checkpoint · {state}, not 'mxfp4' · convert it by "
            "spark_mxfp4.hf.convert_and_replace and save_pretrained, or leave --quantization out"
        )


def refuse_other_activations(hf_config: Any) -> None:
    """Raise ValueError unless SwiGLU has the slope and clamp that are constants in the kernels."""
    activation = (getattr(hf_config, "swiglu_alpha", SWIGLU_ALPHA), getattr(hf_config, "swiglu_limit", SWIGLU_LIMIT))
    if activation != (SWIGLU_ALPHA, SWIGLU_LIMIT):
        raise ValueError(
            f"--quantization {NAME} cannot serve this checkpoint · swiglu_alpha and swiglu_limit are {activation}, its "
            f"kernels know {(SWIGLU_ALPHA, SWIGLU_LIMIT)} · leave --quantization out"
        )


class SparkMxfp4Config(QuantizationConfig):
    """MXFP4 experts on our or vLLM's kernels; attention and LM head as stored, or in a chosen format."""

    def __init__(self) -> None:
        super().__init__()
        versions.refuse_other_releases()
        self.mode = chosen_mode()
        # Keep only the kernel's name: this object is pickled for worker processes, which cannot unpickle every kernel.
        self.kernel_name = chosen_kernel()
        self.linear_format, self.head_format = formats.chosen(LINEAR_VARIABLE), formats.chosen(HEAD_VARIABLE)
        self.routed = fused(ROUTER_VARIABLE) and self.kernel_name != STOCK
        self.fused_attention = fused(ATTENTION_VARIABLE)
        self.fused_reduction = fused(REDUCTION_VARIABLE) and self.kernel_name != STOCK
        self._show_attention()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes from another process, and register our attention in this process."""
        self.__dict__.update(state)
        self._show_attention()

    def _show_attention(self) -> None:
        """Register our backend with vLLM in place of FlashAttention."""
        if self.fused_attention:
            from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: PLC0415

            register_backend(AttentionBackendEnum.FLASH_ATTN, "spark_mxfp4.vllm.attention.SparkAttentionBackend")

    @property
    def reduces(self) -> bool:
        """Whether the norms add the ranks' partial results. Valid only while vLLM creates a model."""
        if not self.fused_reduction:
            return False
        from spark_mxfp4.vllm import norms  # noqa: PLC0415 - needed only if switched on

        norms.leave_sums_open()
        return norms.ranks() is not None

    @classmethod
    def get_name(cls) -> str:
        """Return the name by which vLLM's loader recognises stacked MXFP4 experts (fused_moe/routed_experts.py)."""
        return "gpt_oss_mxfp4"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the model dtypes that work."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the lowest CUDA compute capability; the kernel `torch` runs on all that vLLM supports."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file names, because the configuration is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SparkMxfp4Config:  # noqa: ARG003 (everything in it is implied by the format)
        """Make the configuration; kernel and mode come from the environment."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return this plugin's name for a gpt-oss MXFP4 checkpoint that the plugin takes over, else None.

        The plugin takes a checkpoint over if the user named the plugin or one of its formats, or named nothing and
        stock vLLM cannot run the checkpoint. Raises ValueError if the user named the plugin for another checkpoint.
        """
        method = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, dict) else None
        if user_quant == NAME:
            refuse_other_checkpoints(getattr(hf_config, "model_type", None), method)
            return NAME
        ours = method in CHECKPOINT_METHODS and getattr(hf_config, "model_type", None) == MODEL_TYPE
        named = {formats.chosen(LINEAR_VARIABLE), formats.chosen(HEAD_VARIABLE)} if ours else {AS_STORED}
        needed = named != {AS_STORED} or not stock_has_backend()
        return NAME if ours and user_quant is None and needed else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:  # noqa: ARG002 (vLLM's signature)
        """Raise ValueError for a checkpoint without quantization, for which vLLM does not call the override above.

        Also raises it if both the plugin and vLLM's `--quantization-config` would quantise linear layers or the LM
        head.
        """
        method = (getattr(hf_config, "quantization_config", None) or {}).get("quant_method")
        refuse_other_checkpoints(getattr(hf_config, "model_type", None), method)
        refuse_other_activations(hf_config)
        online = getattr(self.online_quantization_config, "args", None)
        if self.linear_format != AS_STORED and online and (online.linear or online.targets):
            raise ValueError(
                f"linear layers cannot be quantised twice · {LINEAR_VARIABLE} is {self.linear_format!r}, and "
                "--quantization-config names a format too · leave one of them out"
            )
        if self.head_format != AS_STORED and getattr(online, "lm_head", None):
            raise ValueError(
                f"the LM head cannot be quantised twice · {HEAD_VARIABLE} is {self.head_format!r}, and "
                "--quantization-config.lm_head names a format too · leave one of them out"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of experts, linear layers and LM heads; None leaves other layers to vLLM."""
        # Imported here, because these modules are large and need vLLM's platform.
        from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: PLC0415
        from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415
        from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod  # noqa: PLC0415
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # noqa: PLC0415

        from spark_mxfp4.vllm import linear  # noqa: PLC0415
        from spark_mxfp4.vllm.experts import SparkMxfp4MoEMethod  # noqa: PLC0415

        if self.head_format != AS_STORED:
            linear.show_heads_to_the_configuration()  # heads are made after the layers
        if self.routed:
            from spark_mxfp4.vllm import router  # noqa: PLC0415

            router.replace_routers()  # a layer's attention is made before its router
        reduces = self.reduces  # set when attention's first projection is created, before the output projection
        if isinstance(layer, RoutedExperts):
            if self.kernel_name == STOCK:
                return GptOssMxfp4MoEMethod(layer.moe_config)
            if self.routed:
                router.refuse_unsupported(layer)
            layer.moe_config.skip_final_all_reduce = reduces
            return SparkMxfp4MoEMethod(layer.moe_config, registry.load(self.kernel_name), self.mode, routed=self.routed)
        if isinstance(layer, LinearBase):
            return linear.linear_method(self.linear_format, prefix)
        return linear.head_method(self.head_format, prefix) if isinstance(layer, ParallelLMHead) else None
