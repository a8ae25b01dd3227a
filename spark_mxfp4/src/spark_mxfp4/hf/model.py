"""Convert a gpt-oss model of transformers 5.19 to packed MXFP4 experts, or load an MXFP4 checkpoint.

Importing this module registers the experts implementation `spark_mxfp4` and the quantizer of `load_packed`.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP
from transformers.utils import is_accelerate_available, logging
from transformers.utils.quantization_config import Mxfp4Config

from spark_mxfp4 import registry
from spark_mxfp4.hf import implementation, quantizer
from spark_mxfp4.hf.experts import PROJECTIONS, ExpertSizes, PackedExperts, check_activation
from spark_mxfp4.hf.quantizer import KEPT_DENSE
from spark_mxfp4.kernel import MoeKernel
from spark_mxfp4.kernels import triton_hub
from spark_mxfp4.mxfp4 import BLOCK

Kernel: TypeAlias = str | os.PathLike[str] | ModuleType

MODEL_TYPE = "gpt_oss"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

implementation.register()
quantizer.register()


@torch.no_grad()
def convert_and_replace(
    model: PreTrainedModel, kernel: Kernel | None = None, device: torch.device | str | None = None
) -> PreTrainedModel:
    """Replace a gpt-oss model's bf16 experts by our modules in MXFP4, layer by layer, and return the model.

    `kernel` is a name for `registry.load` (default: SPARK_MXFP4_KERNEL, else `triton` on CUDA and `torch` elsewhere),
    or a kernels hub with triton_kernels' interface: an imported package, or the path of its folder. A hub quantises and
    lays out weights by its own functions (`kernels.triton_hub`). With `device`, experts are quantised on that device,
    one at a time, and then the rest of the model moves to it. At most one layer's experts are in memory twice. Experts
    that are packed already, by us or for transformers' stock kernels, keep their bytes and change only kernel and
    device, so a second call completes an interrupted one. Then `save_pretrained` writes a stock checkpoint. Raises
    ValueError before any change for another model type, a dense model, sizes that are no multiple of 32, offloaded
    weights or an unknown kernel. Weights that are not finite raise ValueError at their layer.
    """
    names = _layers(model)
    target = torch.device(device) if device is not None else next(model.get_submodule(names[0]).parameters()).device
    chosen = registry.load(_name(kernel, target))
    for name in names:
        _refuse_unfit(name, model.get_submodule(name))
    for name in logging.tqdm(names, desc="MXFP4 experts", unit="layer"):
        _replace(model, name, chosen, target)
    if device is not None:
        model.to(target)
    _prepare(model)
    model.config.quantization_config = Mxfp4Config(modules_to_not_convert=list(KEPT_DENSE))
    return model


def load_packed(
    model: str,
    kernel: Kernel | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    **options: Any,
) -> PreTrainedModel:
    """Load a gpt-oss MXFP4 checkpoint (a folder or a hub id), keep its experts' bytes, and return the model.

    Blocks and scales are never dequantised; everything else gets `dtype` (`auto`: the checkpoint's). `kernel` and
    `device` are as in `convert_and_replace`. `options` are passed to `from_pretrained`; among them `device_map` may
    replace `device`. With the package `accelerate` weights are loaded directly to the device, else through CPU memory.
    Raises ValueError for another model type, a checkpoint that is not MXFP4 or lacks weights, or offloading.
    """
    hub = {key: value for key, value in options.items() if key in HUB_OPTIONS}
    config = AutoConfig.from_pretrained(model, **hub)
    _refuse_other_checkpoints(model, config)
    target = _first_device(options.get("device_map") if device is None else device)
    name = _name(kernel, target)
    registry.load(name)  # refuse a wrong name before reading gigabytes
    config.quantization_config = {"quant_method": quantizer.NAME, "kernel": name}
    if device is not None and is_accelerate_available():
        options.setdefault("device_map", {"": target})
    loaded, report = AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=dtype, output_loading_info=True, **options
    )
    _refuse_incomplete(model, loaded, report)
    if any(parameter.is_meta for parameter in loaded.parameters()):
        raise ValueError(
            f"cannot keep {model} packed · some of its weights are offloaded · give a device that holds them all"
        )
    if device is not None:
        loaded.to(target)
    _prepare(loaded)
    packed: PreTrainedModel = loaded
    return packed


def _name(kernel: Kernel | None, device: torch.device) -> str:
    """Return the name by which `registry.load` finds `kernel`; for None, the environment decides."""
    if isinstance(kernel, ModuleType):
        return triton_hub.name_of(kernel)
    if isinstance(kernel, os.PathLike):
        return f"{triton_hub.PREFIX}{Path(kernel).absolute()}"
    return kernel or registry.chosen_name(device.type)


def _first_device(device_map: Any) -> torch.device:
    """Return the device on which a `device_map`, or the name of a device, puts the first weights."""
    first = next(iter(device_map.values()), None) if isinstance(device_map, dict) else device_map
    if first in {"auto", "balanced", "balanced_low_0", "sequential"}:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cpu" if first in {None, "disk"} else first)


def _layers(model: Any) -> list[str]:
    """Return the names of the experts' modules, converted or not. Raises ValueError for an unsupported model.

    It returns no modules, because their list would keep every dense layer in memory until the last one is converted.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind != MODEL_TYPE:
        type_name = repr(kind) if kind else type(model).__name__
        sparse = any(hasattr(config, key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
        reason = (
            "its experts are not gpt-oss' (interleaved gate and up, biases)"
            if sparse
            else "it is dense: it has no experts"
        )
        fix = (
            f"use transformers' own quantizers for it, or a {MODEL_TYPE} model"
            if kind
            else f"pass a {MODEL_TYPE} model"
        )
        raise ValueError(f"cannot convert a model of type {type_name} · {reason} · {fix}")
    kinds = GptOssExperts | PackedExperts | Mxfp4GptOssExperts
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    layers = sum(isinstance(module, GptOssMLP) for module in model.modules())
    if not names or len(names) < layers:
        raise ValueError(
            f"cannot convert this gpt_oss model · the experts of {layers - len(names)} of {layers} layers are not "
            "transformers' GptOssExperts: another library has replaced them · load it by spark_mxfp4.hf.load_packed"
        )
    return names


def _refuse_unfit(name: str, experts: Any) -> None:
    if isinstance(experts, PackedExperts):
        return
    check_activation(experts.alpha, experts.limit)
    if isinstance(experts, Mxfp4GptOssExperts):
        if any(isinstance(getattr(experts, projection), torch.Tensor) for projection in PROJECTIONS):
            raise ValueError(f"cannot take over {name} · its weights are not loaded · load the model first")
        return
    for projection in PROJECTIONS:
        weight = getattr(experts, projection)
        if weight.shape[1] % BLOCK:
            raise ValueError(
                f"cannot quantize {name}.{projection} · {weight.shape[1]} inputs are no multiple of {BLOCK} · "
                "leave this model as it is"
            )
    if any(tensor.is_meta for tensor in chain(experts.parameters(), experts.buffers())):
        raise ValueError(
            f"cannot quantize {name} · its weights are offloaded or not loaded · load the model without a device_map"
        )


def _replace(model: PreTrainedModel, name: str, kernel: MoeKernel, device: torch.device) -> None:
    experts = model.get_submodule(name)
    if isinstance(experts, PackedExperts):
        experts.use(kernel)
        experts.to(device)
    elif isinstance(experts, Mxfp4GptOssExperts):
        model.set_submodule(name, _from_stock(experts, kernel, device))
        # The stock quantizer gives each layer's object a `forward` that routes by the stock kernels.
        vars(model.get_submodule(name.rpartition(".")[0])).pop("forward", None)
    else:
        model.set_submodule(name, _packed(name, experts, kernel, device))


def _prepare(model: PreTrainedModel) -> None:
    for experts in model.modules():
        if isinstance(experts, PackedExperts):
            experts.prepare()


def _from_stock(experts: Mxfp4GptOssExperts, kernel: MoeKernel, device: torch.device) -> PackedExperts:
    """Return the packed module for a layer with stock kernels; their layout object restores the checkpoint's bytes."""
    sizes = ExpertSizes(experts.num_experts, experts.hidden_size, experts.intermediate_size)
    packed = PackedExperts(sizes, kernel, experts.gate_up_proj_bias.dtype, device)
    for projection in PROJECTIONS:
        values = getattr(experts, projection).storage
        scales = getattr(experts, f"{projection}_precision_config").weight_scale.storage
        for suffix, storage in (("_blocks", values), ("_scales", scales)):
            parameter = getattr(packed, projection + suffix)
            flat = storage.layout.unswizzle_data(storage.data).transpose(-2, -1)
            parameter.copy_(flat.reshape(parameter.shape))
        getattr(packed, f"{projection}_bias").copy_(getattr(experts, f"{projection}_bias"))
    return packed.train(experts.training)


def _packed(name: str, experts: GptOssExperts, kernel: MoeKernel, device: torch.device) -> PackedExperts:
    """Return the packed module for one layer; at the peak, memory has both layers and one more dense expert."""
    sizes = ExpertSizes(experts.num_experts, experts.hidden_size, experts.intermediate_size)
    packed = PackedExperts(sizes, kernel, experts.gate_up_proj_bias.dtype, device)
    for projection in PROJECTIONS:
        blocks, scales = getattr(packed, f"{projection}_blocks"), getattr(packed, f"{projection}_scales")
        for expert, weight in enumerate(getattr(experts, projection).detach()):  # [K, N]
            dense = weight.to(device).t().contiguous()
            if not dense.isfinite().all():
                raise ValueError(
                    f"cannot quantize {name}.{projection} · expert {expert} holds NaN or infinity · "
                    "download the checkpoint again"
                )
            blocks[expert], scales[expert] = kernel.quantize(dense)
        getattr(packed, f"{projection}_bias").copy_(getattr(experts, f"{projection}_bias"))
    return packed.train(experts.training)


def _refuse_other_checkpoints(model: str, config: Any) -> None:
    if config.model_type != MODEL_TYPE:
        raise ValueError(
            f"cannot load {model} packed · it is a model of type {config.model_type!r}, not {MODEL_TYPE!r} · "
            "load it by transformers' AutoModelForCausalLM"
        )
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method != "mxfp4":
        state = f"its quant_method is {method!r}" if method else "it is not quantized"
        raise ValueError(
            f"cannot load {model} packed · {state}, not 'mxfp4' · load it by transformers and use convert_and_replace"
        )
    check_activation(config.swiglu_alpha, config.swiglu_limit)


def _refuse_incomplete(model: str, loaded: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raise ValueError if the checkpoint lacks weights, which stay random, or has experts of another shape.

    transformers only warns about missing weights, and does not check the shapes of quantized weights.
    """
    problems = [f"{name} is missing" for name in sorted(report.get("missing_keys", ()))]
    for name, experts in loaded.named_modules():
        if isinstance(experts, PackedExperts) and (misfit := experts.misfit()):
            problems.append(f"{name}.{misfit}")
    if problems:
        raise ValueError(
            f"{model} is not a whole gpt-oss checkpoint · {len(problems)} of its weights are wrong, first: "
            f"{problems[0]} · download it again"
        )
