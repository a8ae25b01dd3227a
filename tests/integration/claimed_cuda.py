"""Ask vLLM's own selector for the attention backend of gpt-oss on a made-up NVIDIA GPU; run as a program.

Reads JSON from stdin, {"capability": [major, minor], "questions": [[kv_cache_dtype, backend or null], …]}, and prints
one answer each: {"FULL": …, "SLIDING": …} with the backend's name, or a refusal. vLLM's CUDA platform is imported
without its compiled extensions; FlashInfer is replaced by empty modules. No kernel runs.
"""

import importlib.machinery
import json
import sys
import types

import torch


def fake(name: str) -> None:
    """Install an empty module that has every requested attribute."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__file__ = f"{name}.py"
    module.__getattr__ = lambda attribute: type(attribute, (), {})  # type: ignore[method-assign]
    sys.modules[name] = module


for extension in (
    "vllm._C_stable_libtorch", "flashinfer", "flashinfer.prefill", "flashinfer.decode", "flashinfer.utils",
):  # fmt: skip
    fake(extension)

import vllm.platforms  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.platforms import cuda  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402

request = json.load(sys.stdin)
defaults = VllmConfig()  # made while the platform is the CPU's


class ClaimedCuda(cuda.CudaPlatformBase):
    """vLLM's CUDA platform for a device that does not exist."""

    @classmethod
    def get_device_capability(cls, device_id=0):  # noqa: ARG003 - vLLM's signature
        return DeviceCapability(*request["capability"])

    @classmethod
    def get_device_name(cls, device_id=0):  # noqa: ARG003 - vLLM's signature
        return "claimed"


vllm.platforms.current_platform.__class__ = ClaimedCuda  # the object that modules have already imported
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402


def answer(kv_cache_dtype, backend, *, sliding):
    """Return the name of the backend for one kind of gpt-oss's layers, or the last line of the refusal."""
    config = AttentionSelectorConfig(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype, block_size=None, has_sink=True,
        has_sliding_window=sliding,
    )  # fmt: skip
    chosen = AttentionBackendEnum[backend] if backend else None
    try:
        with set_current_vllm_config(defaults):
            return ClaimedCuda.get_attn_backend_cls(chosen, config, num_heads=64).rpartition(".")[2]
    except ValueError as error:
        return f"refused: {error}"


layers = (("FULL", False), ("SLIDING", True))
answers = [{name: answer(*question, sliding=sliding) for name, sliding in layers} for question in request["questions"]]
print(json.dumps(answers))
