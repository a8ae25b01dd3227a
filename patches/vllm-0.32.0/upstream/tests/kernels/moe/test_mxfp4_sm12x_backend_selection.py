# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MXFP4 MoE backend selection for gpt-oss on compute capability 12.x.

GPU-free: mocks the platform, its capability and whether FlashInfer's CUTLASS
fused MoE is installed, then exercises the oracle.
"""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import flashinfer_cutlass_moe
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum

RTX_PRO_6000 = (12, 0)
GB10 = (12, 1)
NATIVE_FP4 = Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_MXFP8


def gpt_oss_120b(**overrides) -> FusedMoEConfig:
    """The config that GptOssForCausalLM makes for openai/gpt-oss-120b."""
    config = dict(
        num_experts=128,
        num_local_experts=128,
        num_logical_experts=128,
        experts_per_token=4,
        hidden_dim=2880,
        intermediate_size=2880,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        activation=MoEActivation.SWIGLUOAI,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        in_dtype=torch.bfloat16,
        has_bias=True,
    )
    return FusedMoEConfig(**(config | overrides))


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch):
    """Select a backend on a made-up GPU; returns (backend, logged warnings)."""

    def select(
        capability,
        *,
        flashinfer: bool = True,
        selector=mxfp4.select_mxfp4_moe_backend,
        **overrides,
    ):
        platform = type(current_platform)
        monkeypatch.setattr(platform, "_enum", PlatformEnum.CUDA)
        monkeypatch.setattr(platform, "device_name", "cuda", raising=False)
        monkeypatch.setattr(platform, "device_type", "cuda")
        monkeypatch.setattr(
            platform,
            "get_device_capability",
            classmethod(lambda cls, device_id=0: DeviceCapability(*capability)),
        )
        for module in (mxfp4, flashinfer_cutlass_moe):
            monkeypatch.setattr(
                module,
                "has_flashinfer_cutlass_fused_moe",
                lambda: flashinfer,
                raising=False,
            )
        model_config = SimpleNamespace(quantization_config=None)
        monkeypatch.setattr(
            mxfp4,
            "get_current_vllm_config",
            lambda: SimpleNamespace(model_config=model_config),
        )
        warnings: list[str] = []
        monkeypatch.setattr(
            mxfp4.logger,
            "warning_once",
            lambda message, *args, **_: warnings.append(message % args),
            raising=False,
        )
        backend, _ = selector(gpt_oss_120b(**overrides))
        return backend, warnings

    return select


@pytest.mark.parametrize("moe_backend", ["auto", "flashinfer_cutlass"])
@pytest.mark.parametrize("capability", [RTX_PRO_6000, GB10])
def test_gpt_oss_uses_the_fp4_tensor_cores(select, capability, moe_backend):
    backend, warnings = select(capability, moe_backend=moe_backend)
    assert backend == NATIVE_FP4
    assert warnings == []


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"flashinfer": False}, "FlashInfer's CUTLASS fused MoE is not installed"),
        ({"is_lora_enabled": True}, "kernel does not support LoRA"),
    ],
)
def test_the_fallback_says_why(select, overrides, reason):
    backend, warnings = select(GB10, **overrides)
    assert backend != NATIVE_FP4
    assert any(
        f"'{NATIVE_FP4.value}' cannot be used since {reason}" in warning
        for warning in warnings
    )


def test_a_named_backend_is_left_alone(select):
    assert select(GB10, moe_backend="marlin")[0] == Mxfp4MoeBackend.MARLIN


def test_a_model_without_biases_is_left_alone(select):
    assert select(GB10, has_bias=False)[0] != NATIVE_FP4


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (11, 0)])
def test_other_families_are_left_alone(select, capability):
    backend, warnings = select(capability)
    assert backend != NATIVE_FP4
    assert not any("compute capability 12.x" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("capability", "native"), [(RTX_PRO_6000, True), (GB10, True), ((9, 0), False)]
)
def test_native_mxfp4_experts_without_biases(select, capability, native):
    backend, _ = select(
        capability,
        selector=mxfp4.select_deepseek_v4_mxfp4_moe_backend,
        activation=MoEActivation.SILU,
        has_bias=False,
    )
    assert (backend == NATIVE_FP4) is native
