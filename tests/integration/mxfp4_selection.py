"""Ask vLLM's own MXFP4 selector which MoE backend it takes; run as a program inside the tree under test.

Reads [{"capability": [12, 1] | null, "flashinfer": true, "config": {…}}, …] from stdin and prints one
{"backend": …, "error": …, "warnings": […], "source": …} each. Cases without a capability, asked of the CPU as it is,
stand first. For the others the CPU build's platform claims to be CUDA: nothing but the answers to "which platform?",
"which capability?" and "is FlashInfer there?" is made up.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm.platforms
import vllm.utils.flashinfer
from vllm.platforms.interface import DeviceCapability, PlatformEnum

now = {"flashinfer": True}
vllm.utils.flashinfer.has_flashinfer = lambda: now["flashinfer"]
vllm.utils.flashinfer.has_flashinfer_cutlass_fused_moe = lambda: now["flashinfer"]

from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.oracle import mxfp4  # noqa: E402

# No model is loaded, so nobody overrides the activations; the real function would ask for the running engine's config.
mxfp4.get_current_vllm_config = lambda: SimpleNamespace(model_config=SimpleNamespace(quantization_config=None))

# gpt-oss-120b as vllm/model_executor/models/gpt_oss.py builds it.
GPT_OSS = {
    "num_experts": 128,
    "num_local_experts": 128,
    "num_logical_experts": 128,
    "experts_per_token": 4,
    "hidden_dim": 2880,
    "intermediate_size": 2880,
    "activation": MoEActivation.SWIGLUOAI,
    "device": "cpu",
    "routing_method": RoutingMethodType.Renormalize,
    "in_dtype": torch.bfloat16,
    "has_bias": True,
}


def claim_cuda(capability):
    """Let the platform that every module holds by now answer as CUDA; the CPU build cannot be imported as CUDA."""
    platform = type(vllm.platforms.current_platform)
    platform._enum = PlatformEnum.CUDA
    platform.device_name = platform.device_type = "cuda"
    platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))


def select(case):
    now["flashinfer"] = case["flashinfer"]
    if case["capability"]:
        claim_cuda(case["capability"])
    warnings = []
    mxfp4.logger.warning_once = lambda message, *args, **_: warnings.append(message % args)
    alone = FusedMoEParallelConfig.make_no_parallel()
    config = FusedMoEConfig(moe_parallel_config=alone, **{**GPT_OSS, **case["config"]})
    backend = error = None
    try:
        backend = mxfp4.select_mxfp4_moe_backend(config)[0].value
    except (ValueError, NotImplementedError) as raised:
        error = str(raised)
    return {"backend": backend, "error": error, "warnings": warnings, "source": str(Path(vllm.__file__).parent)}


print(json.dumps([select(case) for case in json.load(sys.stdin)]))
