"""
Copyright (c) 2026 by FlashInfer team.

Licensed under the Apache License, Version 2.0 (the "License");
you may not use this file except in compliance with the License.
You may obtain a copy of the License at

  http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software
distributed under the License is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
See the License for the specific language governing permissions and
limitations under the License.
"""

import itertools

import pytest
import torch

from flashinfer.attention import _core


@pytest.fixture
def jit_args(monkeypatch):
    """Return what the wrapper asks the JIT for; nothing is compiled, no GPU is used."""
    requests = []

    def record(self, *args, **kwargs):
        requests.append(kwargs["jit_args"])

    parent = _core.BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setattr(parent, "__init__", record)

    def jit_args(**kwargs):
        _core.BatchAttentionWithAttentionSinkWrapper(
            torch.empty(0), backend="fa2", q_data_type=torch.bfloat16, **kwargs
        )
        return requests[-1]

    return jit_args


KV_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
HEAD_DIMS = (64, 128)


@pytest.mark.parametrize("window_left", [-1, 127])
def test_different_sources_have_different_uris(jit_args, window_left):
    uris = [
        jit_args(
            kv_data_type=kv, head_dim_qk=dim, head_dim_vo=dim, window_left=window_left
        )[0]
        for kv, dim in itertools.product(KV_DTYPES, HEAD_DIMS)
    ]
    assert len(set(uris)) == len(uris)


def test_head_dims_of_qk_and_vo_are_told_apart(jit_args):
    first = jit_args(head_dim_qk=192, head_dim_vo=128)[0]
    second = jit_args(head_dim_qk=128, head_dim_vo=192)[0]
    assert first != second


def test_equal_requests_have_equal_uris(jit_args):
    kwargs = dict(kv_data_type=torch.float8_e4m3fn, head_dim_qk=64, head_dim_vo=64)
    assert jit_args(**kwargs)[0] == jit_args(**kwargs)[0]


def test_only_the_uri_changes(jit_args):
    """Everything after the name is what the JIT gets without this change, too."""
    uri, *rest = jit_args(kv_data_type=torch.bfloat16, head_dim_qk=64, head_dim_vo=64)
    assert uri.startswith("batch_prefill_attention_sink_bf16_")
    assert uri.endswith("_swa_False_fa2")
    assert rest[:6] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.bfloat16,
        torch.int32,
        64,
        64,
    ]
