"""The plan computes the KV cache as vLLM does: page sizes, and the bytes that admission reserves for a request."""

import json
from types import SimpleNamespace

import pytest

from sparkforge.models import recipes as models
from sparkforge.plan.architecture import KV_BLOCK, STEPS_UNDER_WAY, parse

pytestmark = pytest.mark.integration
MODEL = parse(models.load()["gpt-oss-120b"].config, "test")
# Passes gpt-oss-120b's layers to vLLM's KV cache manager; prints the page sizes and the reserved bytes.
PROGRAM = """
import json, sys
from types import SimpleNamespace as Some
import torch
from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

answers = []
for dtype, length, batched in json.loads(sys.argv[1]):
    shape = dict(block_size=16, num_kv_heads=8, head_size=64, dtype=getattr(torch, dtype))
    specs = {
        f"layer.{n}": FullAttentionSpec(**shape) if n % 2 else SlidingWindowSpec(**shape, sliding_window=128)
        for n in range(36)
    }
    config = Some(
        model_config=Some(max_model_len=length), max_in_flight_tokens=2 * batched,
        parallel_config=Some(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=Some(max_num_batched_tokens=batched), cache_config=Some(num_gpu_blocks_override=None),
    )
    groups = utils._get_kv_cache_groups_uniform_page_size(specs)
    needed = [(g.kv_cache_spec.max_memory_usage_bytes(config), g.kv_cache_spec.page_size_bytes) for g in groups]
    per_request = sum(-(-memory // page) for memory, page in needed)
    pages = {spec.page_size_bytes for spec in specs.values()}
    block = max(len(g.layer_names) for g in groups) * pages.pop()
    answers.append([block, per_request * block, [len(g.layer_names) for g in groups], len(pages)])
configs = [
    Some(parallel_config=Some(pipeline_parallel_size=1), use_v2_model_runner=runner,
         scheduler_config=Some(async_scheduling=True))
    for runner in (True, False)
]
print(json.dumps([answers, list(map(VllmConfig.max_concurrent_batches.fget, configs))]))
"""
CASES = [
    ("bfloat16", 131_072, 8_192), ("bfloat16", 32_768, 4_096), ("bfloat16", 100, 8_192),
    ("float8_e4m3fn", 8_192, 2_048),
]  # fmt: skip


@pytest.fixture(scope="module")
def answers(vllm_trees, vllm_process):
    requests, steps = vllm_process(vllm_trees.patched).answer(PROGRAM, json.dumps(CASES))
    return SimpleNamespace(requests=dict(zip(CASES, requests, strict=True)), steps=steps)


@pytest.mark.parametrize("case", CASES)
def test_a_request_takes_what_vllm_reserves_for_it(answers, case):
    dtype, length, batched = case
    assert answers.steps == [STEPS_UNDER_WAY] * 2
    kv = "bf16" if dtype == "bfloat16" else "fp8"
    block, reserved, groups, other_pages = answers.requests[case]
    assert (groups, other_pages) == ([18, 18], 0)  # one group of full layers, one of sliding layers, equal page sizes
    assert block == 18 * KV_BLOCK * MODEL.kv_layer_token(kv)
    assert reserved == MODEL.kv_admitted(length, STEPS_UNDER_WAY * batched, kv)


# The same for recipes of other families: vLLM's code computes the shapes of the states (Ling, Qwen3.6).
FAMILIES = """
import contextlib, json, sys
from types import SimpleNamespace as Some
import torch
import vllm.config.vllm
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models import bailing_moe_v3 as hybrid
from vllm.model_executor.layers.mamba import mamba_utils as states
from vllm.platforms.interface import Platform
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

class Backend:
    sizes = [64]
    get_supported_kernel_block_sizes = classmethod(lambda cls: cls.sizes)
    customize_spec = staticmethod(lambda spec: spec)

class Gated:  # the same as the class in qwen3_5.py, which cannot be imported without torchvision
    @staticmethod
    def get_mamba_state_shape_from_config(config):
        hf = config.model_config.hf_config
        return states.MambaStateShapeCalculator.gated_delta_net_state_shape(
            1, hf.linear_num_key_heads, hf.linear_num_value_heads, hf.linear_key_head_dim, hf.linear_value_head_dim,
            hf.linear_conv_kernel_dim, 0)

    get_mamba_state_dtype_from_config = staticmethod(
        lambda _: states.MambaStateDtypeCalculator.gated_delta_net_state_dtype(torch.bfloat16, "auto", "float32"))

class Machine(Platform):
    _find_non_ssm_backends = classmethod(lambda cls, config: [Backend])

vllm.config.vllm.set_current_vllm_config = lambda config: contextlib.nullcontext()

def reserved(name, hf, length):
    cache = Some(cache_dtype="auto", block_size=16, mamba_cache_mode="align", mamba_page_size_padded=None,
                 mamba_block_size=None, mamba_cache_dtype="auto", kv_cache_dtype_skip_layers=[])
    latent, gated = hasattr(hf, "kv_lora_rank"), hasattr(hf, "linear_num_key_heads")
    head = hf.kv_lora_rank + hf.qk_rope_head_dim if latent else hf.head_dim
    heads = 1 if latent else hf.num_key_value_heads
    model = Some(dtype=torch.bfloat16, use_mla=latent, get_num_kv_heads=lambda _: heads, hf_config=hf,
                 max_model_len=length, get_head_size=lambda: head, architecture=name)
    known = Gated if gated else hybrid.BailingMoeV3ForCausalLM
    ModelRegistry.resolve_model_cls = lambda *args, **named: (known, "")
    Backend.sizes = [16 if gated else 64]
    parallel = Some(tensor_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1)
    config = Some(cache_config=cache, model_config=model, parallel_config=parallel, speculative_config=None)
    kind = MLAAttentionSpec if latent else FullAttentionSpec
    attention = lambda size: kind(block_size=size, num_kv_heads=heads, head_size=head, dtype=torch.bfloat16)
    if name.startswith("ling") or gated:
        Machine._align_hybrid_block_size(config, Backend)
        state = MambaSpec(shapes=known.get_mamba_state_shape_from_config(config),
                          dtypes=known.get_mamba_state_dtype_from_config(config), block_size=cache.block_size,
                          mamba_cache_mode="align", page_size_padded=cache.mamba_page_size_padded)
        linear = lambda n: (n + 1) % hf.full_attention_interval if gated else hybrid._is_kda_layer(
            n, hf.layer_group_size, hf.num_hidden_layers)
        full = attention(cache.block_size)
        specs = {f"layer.{n}": state if linear(n) else full for n in range(hf.num_hidden_layers)}
        groups = utils._get_kv_cache_groups_uniform_page_size(specs)
    else:
        specs = {f"layer.{n}": attention(16) for n in range(hf.num_hidden_layers)}
        groups = utils._get_kv_cache_groups_uniform_spec(specs)
    width = max(len(group.layer_names) for group in groups)
    return sum(group.kv_cache_spec.max_memory_usage_bytes(config) for group in groups) * width

print(json.dumps([reserved(name, Some(**hf), length) for name, hf, length in json.loads(sys.argv[1])]))
"""
OTHERS = [
    (name, length)
    for name in ("ling-3.0-flash-fp4", "qwen3-30b-a3b-fp8", "qwen3-0.6b", "glm-4.7-flash-nvfp4", "qwen3.6-35b-a3b-fp8")
    for length in (100, 40_960)
]


def test_a_request_of_another_family_takes_what_vllm_reserves_for_it(vllm_trees, vllm_process):
    known = models.load()
    asked = [(name, known[name].config | known[name].config.get("text_config", {}), length) for name, length in OTHERS]
    sizes = [parse(known[name].config, name).kv_admitted(length, 1, "bf16") for name, length in OTHERS]
    assert vllm_process(vllm_trees.patched).answer(FAMILIES, json.dumps(asked)) == sizes


SIZES = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

with torch.device("meta"):
    models = [AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)) for config in json.loads(sys.argv[1])]
print(json.dumps([sum(parameter.numel() for parameter in model.parameters()) for model in models]))
"""
COUNTED = {"glm-4.7-flash-nvfp4": "glm4_moe_lite", "qwen3.6-35b-a3b-fp8": "qwen3_5_moe_text",
           "deepseek-v4-flash": "deepseek_v4"}  # fmt: skip


def test_weights_are_those_of_transformers_classes(vllm_trees, vllm_process):
    configs = []
    for name, kind in COUNTED.items():
        config = models.load()[name].config
        merged = {**config, **config.get("text_config", {}), "model_type": kind}
        configs.append({k: v for k, v in merged.items() if k not in ("quantization_config", "text_config")})
    parts = [parse(models.load()[name].config, name).parts() for name in COUNTED]
    # In transformers a router's bias is a buffer, not a parameter.
    counted = [sum(part.count + part.plain * (part.role != "router") for part in model) for model in parts]
    assert vllm_process(vllm_trees.patched).answer(SIZES, json.dumps(configs)) == counted


COMPRESSED = """
import json
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec

def bytes_a_token(**own):
    spec = MLAAttentionSpec(block_size=256, num_kv_heads=1, dtype=torch.uint8, alignment=576, **own)
    return spec.page_size_bytes / 256

entry = {"head_size": 512, "state_content_bytes": 584, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
four, many = (bytes_a_token(tokens_per_state=tokens, **entry) for tokens in (4, 128))
print(json.dumps(21 * (four + bytes_a_token(tokens_per_state=4, head_size=132)) + 20 * many))
"""


def test_a_compressed_cache_grows_at_most_as_the_plan_says(vllm_trees, vllm_process):
    grown = vllm_process(vllm_trees.patched).answer(COMPRESSED)
    model = parse(models.load()["deepseek-v4-flash"].config, "test")
    assert grown <= model.kv_read(20_001, "fp8") - model.kv_read(20_000, "fp8") < 1.1 * grown
