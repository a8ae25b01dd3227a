"""A program of the validator in the server's interpreter: imports torch and vllm and queries their choices.

`python -P deep_child.py REQUEST ANSWERS` with REQUEST = JSON {"model": DIR or null, "serve_args": [...],
"layer": sizes of a layer and its entries in families.toml}. Each fact is one JSON line in the file ANSWERS, written as
soon as it is known, so that a later crash loses nothing. It needs only the standard library, torch and vllm: it is
started by its path, and its environment may lack this package.
"""

import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The module of the server's options: since vLLM 0.33.0, in 0.32.0, and before.
OPTION_MODULES = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)


def server_options() -> Any:
    """Return the module of vLLM that defines the server's options."""
    for name in OPTION_MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {', '.join(OPTION_MODULES)}")


class Questions:
    """Queries of vLLM 0.32.0; each returns a JSON value or raises any exception."""

    def __init__(self, model: str | None, serve_args: list[str], layer: dict[str, Any] | None = None) -> None:
        self.model, self.serve_args, self.layer = model, serve_args, layer or {}

    @property
    def platform(self) -> Any:
        """The platform of vLLM."""
        from vllm.platforms import current_platform  # noqa: PLC0415 - only this process may import vllm

        return current_platform

    @functools.cached_property
    def config(self) -> Any:
        """The VllmConfig that the server would build from the same arguments, by vLLM's own parser."""
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

        if self.model is None:
            raise LookupError("no model directory was given")
        arguments = [*self.serve_args, "--model", self.model]
        options = server_options().make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
        return AsyncEngineArgs.from_cli_args(options).create_engine_config()

    def torch_cuda(self) -> str | None:
        """The CUDA version for which torch was built; None for a CPU build."""
        import torch  # noqa: PLC0415

        return None if torch.version.cuda is None else str(torch.version.cuda)

    def platform_name(self) -> str:
        """Class of vLLM's platform."""
        return str(getattr(self.platform, "__name__", type(self.platform).__name__))

    def capability(self) -> str | None:
        """Compute capability as vLLM sees it."""
        capability = self.platform.get_device_capability()
        return None if capability is None else f"{capability.major}.{capability.minor}"

    def is_blackwell_class(self) -> bool:
        """The result of the method that our first patch adds."""
        # vLLM's Platform returns None for unknown attributes (vllm/platforms/interface.py, __getattr__).
        method = getattr(self.platform, "is_blackwell_class", None)
        if method is None:
            raise LookupError("vLLM's platform has no is_blackwell_class(): the patch is not applied")
        return bool(method())

    def quantization(self) -> str | None:
        """Quantization method that vLLM resolved for the model's experts."""
        method = self.config.model_config.quantization
        if getattr(self.config.quant_config, "kernel_name", "") == "vllm":  # our plugin leaves the experts to vLLM
            return str(self.config.quant_config.get_name())
        return None if method is None else str(method)

    def moe_backend(self) -> str:
        """The result of vLLM's own selector for this model's experts on this device."""
        from vllm.config import set_current_vllm_config  # noqa: PLC0415

        with set_current_vllm_config(self.config):
            experts, layers = self.moe_config(), "vllm.model_executor.layers"
            module, function, *keys = self.layer["selector"]
            select = getattr(importlib.import_module(f"{layers}.fused_moe.oracle.{module}"), function)
            known = importlib.import_module(f"{layers}.quantization.utils.quant_utils")
            return str(select(experts, *(getattr(known, key) for key in keys))[0].name)

    def moe_config(self) -> Any:
        """The FusedMoEConfig of one layer, as its model and fused_moe/layer.py build it on one device."""
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: PLC0415
        from vllm.model_executor.layers.fused_moe.config import (  # noqa: PLC0415
            FusedMoEConfig,
            FusedMoEParallelConfig,
            RoutingMethodType,
        )

        config, layer = self.config, self.layer
        if not layer.get("experts"):
            raise LookupError("the model has no experts, or is of no known family")
        return FusedMoEConfig(
            num_experts=layer["experts"],
            num_local_experts=layer["experts"],
            num_logical_experts=layer["experts"],
            experts_per_token=layer["top_k"],
            hidden_dim=layer["hidden"],
            intermediate_size=layer["intermediate"],
            activation=MoEActivation.from_str(layer["activation"]),
            has_bias=layer["bias"],
            in_dtype=config.model_config.dtype,
            device=config.device_config.device,
            routing_method=RoutingMethodType[layer["routing"]],
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            moe_backend=config.kernel_config.moe_backend,
            is_lora_enabled=config.lora_config is not None,
        )

    def dense_kernels(self) -> dict[str, str]:
        """Return dense layer (qkv_proj, o_proj, lm_head) → the kernel for one device's share of the layer.

        The kernel is `bf16` for unchanged weights, `spark-mxfp4` and our format, or the class that vLLM selects for the
        share's size. No weights are loaded; they are on the meta device.
        """
        from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear  # noqa: PLC0415
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # noqa: PLC0415

        hf, quantization = self.config.model_config.hf_config, self.config.quant_config
        devices = self.config.parallel_config.tensor_parallel_size
        heads = hf.num_attention_heads // devices * hf.head_dim
        keys = max(1, hf.num_key_value_heads // devices) * hf.head_dim
        sizes = {
            "qkv_proj": (QKVParallelLinear, heads + 2 * keys, hf.hidden_size),
            "o_proj": (RowParallelLinear, hf.hidden_size, heads),
            "lm_head": (ParallelLMHead, hf.vocab_size // devices, hf.hidden_size),
        }
        ours = {"lm_head": getattr(quantization, "head_format", "bf16")}
        kernels = {}
        for name, (layer_class, rows, columns) in sizes.items():
            own = ours.get(name, getattr(quantization, "linear_format", "bf16"))
            kernels[name] = f"spark-mxfp4 {own}" if own != "bf16" else self.kernel_of(layer_class, name, rows, columns)
        return kernels

    def kernel_of(self, layer_class: type, name: str, rows: int, columns: int) -> str:
        """The class of vLLM's kernel for one layer, from vLLM's online quantization; `bf16` if it selects none."""
        import torch  # noqa: PLC0415
        from vllm.config import set_current_vllm_config  # noqa: PLC0415

        online = getattr(self.config.quant_config, "online_quantization_config", None)
        prefix = name if name == "lm_head" else f"model.layers.0.attn.{name}"
        resolved = online and online.resolve_quant_method_cls(layer_class, prefix)
        if not resolved:
            return "bf16"
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.config.model_config.dtype)
        try:
            with set_current_vllm_config(self.config):
                _join_a_world_of_one()
                method, layer = resolved[-1](), torch.nn.Module()
                dtype = self.config.model_config.dtype
                # If the kernel depends on the layer's size, this call chooses it.
                method.create_weights(layer, columns, [rows], columns, rows, dtype, weight_loader=lambda *_: None)
        finally:
            torch.set_default_dtype(before)
        package = "vllm.model_executor.kernels.linear"
        return next(type(part).__name__ for part in vars(method).values() if type(part).__module__.startswith(package))

    def attention_backend(self) -> list[str]:
        """Names of the backends that vLLM selects for the model's full and sliding layers."""
        from vllm.config import set_current_vllm_config  # noqa: PLC0415
        from vllm.v1.attention.selector import get_attn_backend  # noqa: PLC0415

        model, cache = self.config.model_config, self.config.cache_config.cache_dtype
        sinks, windows = self.layer.get("sinks", False), {False, self.layer.get("windows", False)}

        def select(sliding: bool) -> str:
            size, dtype = model.get_head_size(), model.dtype
            return str(get_attn_backend(size, dtype, cache, has_sink=sinks, has_sliding_window=sliding).get_name())

        with set_current_vllm_config(self.config):
            return sorted(set(map(select, windows)))


@functools.cache
def _join_a_world_of_one() -> None:
    """Set up vLLM's process groups with one process; vLLM's parameters read their rank from them."""
    from vllm.distributed import parallel_state  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
        parallel_state.initialize_model_parallel(1)


# Ordered by risk: queries that can crash the process come last.
QUESTIONS: tuple[tuple[str, str, Callable[[Questions], Any]], ...] = (
    ("deep.torch_cuda", "torch.version.cuda", Questions.torch_cuda),
    ("deep.platform", "vllm.platforms.current_platform", Questions.platform_name),
    ("deep.capability", "current_platform.get_device_capability()", Questions.capability),
    ("deep.is_blackwell_class", "current_platform.is_blackwell_class()", Questions.is_blackwell_class),
    ("deep.quantization", "VllmConfig.model_config.quantization", Questions.quantization),
    ("deep.moe_backend", "vLLM's selector of experts' backends", Questions.moe_backend),
    ("deep.dense_kernels", "vLLM's resolver and selection of linear kernels", Questions.dense_kernels),
    ("deep.attention_backend", "vLLM's get_attn_backend()", Questions.attention_backend),
)


def main(request: str, answers: str) -> None:
    """Answer every question in turn."""
    arguments = json.loads(request)
    questions = Questions(arguments["model"], arguments["serve_args"], arguments["layer"])
    with Path(answers).open("a", encoding="utf-8") as file:
        for name, source, ask in QUESTIONS:
            entry: dict[str, Any] = {"name": name, "source": source, "value": None, "error": None}
            try:
                entry["value"] = ask(questions)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - vLLM's parser exits; both are recorded
                entry["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            file.write(json.dumps(entry) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3])
