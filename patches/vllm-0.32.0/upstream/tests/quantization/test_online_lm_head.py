# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An LM head that the checkpoint leaves in bf16 can be quantized online."""

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.quantization import QuantizationConfigArgs
from vllm.distributed import cleanup_dist_env_and_memory, parallel_state
from vllm.model_executor.layers.linear import LinearMethodBase, ReplicatedLinear
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
)
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PtpcOnlineLinearMethod,
    OnlineLinearBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.utils import configure_quant_config
from vllm.model_executor.models import gpt_oss
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

VOCABULARY, HIDDEN = 256, 64


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    with set_current_vllm_config(VllmConfig()):
        init = tmp_path_factory.mktemp("group") / "init"
        parallel_state.init_distributed_environment(1, 0, f"file://{init}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    yield
    cleanup_dist_env_and_memory()


class _Halving(OnlineLinearBase):
    """A format without a kernel, so that the test needs no device."""

    activation_quant_key = None

    def __init__(self):
        self.requantization_source = None
        self.requantization_source_parameters = {}

    def process_weights_after_loading(self, layer):
        replace_parameter(layer, "weight", layer.weight.data.float() / 2)

    def apply(self, layer, x, bias=None):
        return x.float() @ layer.weight.t()


class _Checkpoint(GptOssMxfp4Config):
    """A checkpoint that quantizes its LM head itself."""

    def get_quant_method(self, layer, prefix):
        return _Halving() if isinstance(layer, ParallelLMHead) else None


def _config(checkpoint=GptOssMxfp4Config, **args):
    config = checkpoint()
    config.online_quantization_config = OnlineQuantizationConfig(
        QuantizationConfigArgs(**args)
    )
    return config


@pytest.fixture
def halving(monkeypatch):
    def chosen(_self, spec, *_):
        return _Halving if spec else None

    monkeypatch.setattr(OnlineQuantizationConfig, "_get_method_cls", chosen)


def _head(config):
    with set_current_vllm_config(VllmConfig()):
        return ParallelLMHead(
            VOCABULARY, HIDDEN, quant_config=config, prefix="lm_head"
        )


@pytest.mark.parametrize(
    "name", ["fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4"]
)
def test_lm_head_takes_the_names_of_linear(name):
    args = QuantizationConfigArgs(lm_head=name)
    assert args.lm_head == QuantizationConfigArgs(linear=name).linear
    assert args.linear is None


def test_only_the_lm_head_is_resolved():
    online = _config(lm_head="fp8_per_channel").online_quantization_config
    resolved = online.resolve_quant_method_cls(ParallelLMHead, "lm_head")
    assert resolved[-1] is Fp8PtpcOnlineLinearMethod
    assert online.resolve_quant_method_cls(ReplicatedLinear, "o_proj") is None
    assert online.resolve_quant_method_cls(VocabParallelEmbedding, "embed") is None


def test_the_head_is_quantized_online_beside_the_checkpoint(halving):
    head = _head(_config(lm_head="fp8_per_channel"))
    assert isinstance(head.quant_method, _Halving)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=head.params_dtype)
    head.weight.weight_loader(head.weight, weight)
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(
        head.quant_method.apply(head, x), x @ weight.float().t() / 2
    )


def test_a_real_kernel_multiplies_by_the_loaded_head():
    """FP8 by channel is the format that has a kernel on every platform, CPUs too."""

    class ModelConfig:
        dtype = torch.bfloat16

    vllm_config, device = VllmConfig(), current_platform.device_type
    vllm_config.model_config = ModelConfig()
    with (
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(torch.bfloat16),
        torch.device(device),
    ):
        head = ParallelLMHead(
            VOCABULARY,
            HIDDEN,
            quant_config=_config(lm_head="fp8_per_channel"),
            prefix="lm_head",
        )
        weight = torch.randn(VOCABULARY, HIDDEN)
        head.weight.weight_loader(head.weight, weight)
        assert head.weight.dtype == torch.float8_e4m3fn
        x = torch.randn(3, HIDDEN)
        product = head.quant_method.apply(head, x).float()
    expected = x.float() @ weight.float().t()
    # Weights and activations each lose 2.6 % in E4M3.
    assert 0.01 < (product - expected).norm() / expected.norm() < 0.06


def test_without_lm_head_it_stays(halving):
    head = _head(_config(linear="fp8_per_channel"))
    assert not isinstance(head.quant_method, LinearMethodBase)
    assert isinstance(head.quant_method, UnquantizedEmbeddingMethod)


def test_a_head_that_the_checkpoint_quantizes_keeps_its_method():
    head = _head(_config(_Checkpoint, lm_head="fp8_per_channel"))
    assert isinstance(head.quant_method, _Halving)


def test_a_tied_head_leaves_the_embedding_as_it_is(halving):
    with set_current_vllm_config(VllmConfig()):
        embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN)
    embedding.weight.data.normal_()
    before = embedding.weight.data.clone()
    head = _head(_config(lm_head="mxfp4")).tie_weights(embedding)
    head.quant_method.process_weights_after_loading(head)
    assert torch.equal(embedding.weight, before)
    torch.testing.assert_close(head.weight.data, before.float() / 2)


def test_gpt_oss_asks_its_quantization_about_the_head(monkeypatch):
    asked = {}

    class Head(torch.nn.Module):
        def __init__(self, *_args, **kwargs):
            super().__init__()
            asked.update(kwargs)

    class Model(torch.nn.Module):
        make_empty_intermediate_tensors = None

        def __init__(self, **_):
            super().__init__()

    monkeypatch.setattr(gpt_oss, "GptOssModel", Model)
    monkeypatch.setattr(gpt_oss, "ParallelLMHead", Head)
    monkeypatch.setattr(gpt_oss, "LogitsProcessor", lambda *_: None)
    vllm_config = VllmConfig()
    vllm_config.quant_config = _config(lm_head="mxfp8")
    configure_quant_config(vllm_config.quant_config, gpt_oss.GptOssForCausalLM)

    class ModelConfig:
        class hf_config:
            vocab_size, hidden_size = VOCABULARY, HIDDEN

    vllm_config.model_config = ModelConfig()
    gpt_oss.GptOssForCausalLM(vllm_config=vllm_config)
    assert asked["quant_config"] is vllm_config.quant_config
