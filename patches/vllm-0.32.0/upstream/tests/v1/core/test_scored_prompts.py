# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""On a CPU a step scores few tokens of prompts, so that others do not wait."""

import json

import pytest
import torch

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 100,
}


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def is_cpu(request, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: request.param)
    return request.param


@pytest.fixture
def scheduler(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(
        model=str(tmp_path), skip_tokenizer_init=True, dtype="float32", seed=0
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = 10_000
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return Scheduler(
        config,
        KVCacheConfig(10_000, [], [KVCacheGroupSpec(["layer"], spec)]),
        StructuredOutputManager(config),
        block_size=16,
    )


def add(scheduler, name: str, length: int, scores: bool) -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=0 if scores else None)
    scheduler.add_request(Request(name, list(range(length)), params, None))


def step(scheduler) -> dict[str, int]:
    return scheduler.schedule().num_scheduled_tokens


def test_scored_prompts_take_few_tokens_of_a_step_in_turn(scheduler, is_cpu):
    add(scheduler, "scored", 140, True)
    assert step(scheduler) == {"scored": 128 if is_cpu else 140}
    if not is_cpu:
        return
    add(scheduler, "other", 500, False)
    assert step(scheduler) == {"scored": 8, "other": 500}
    add(scheduler, "second", 1000, True)
    assert step(scheduler) == {"scored": 4, "second": 4}
    add(scheduler, "third", 1000, True)
    assert step(scheduler) == {"second": 8, "third": 1}


def test_only_the_tokens_of_prompts_are_bounded(scheduler, is_cpu):
    add(scheduler, "other", 2000, False)
    add(scheduler, "scored", 3, True)
    assert step(scheduler) == {"other": 2000, "scored": 3}
