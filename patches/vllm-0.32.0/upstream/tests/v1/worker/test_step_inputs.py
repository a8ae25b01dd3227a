# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A step with the last step's requests reuses what follows from them alone."""

import inspect
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample import sampler as sampler_module
from vllm.v1.worker.gpu.sample.sampler import Sampler

CPU = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch):
    """Replace kernels by nothing, and copies to the GPU by copies that count."""
    made = []

    def copy(data, device=None, dtype=None, out=None):
        made.append(data)
        tensor = torch.as_tensor(np.array(data))
        return out.copy_(tensor) if out is not None else tensor.to(dtype)

    monkeypatch.setattr(model_runner, "async_tensor_h2d", copy)
    monkeypatch.setattr(model_runner, "prepare_pos_seq_lens", Mock())
    combine = Mock(side_effect=lambda *a, **k: torch.arange(a[8]))
    monkeypatch.setattr(model_runner, "combine_sampled_and_draft_tokens", combine)
    return made


@pytest.fixture
def prepare(copies):
    """prepare_inputs of a runner for the given slots and numbers of tokens."""
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.device, runner.max_num_reqs, runner.decode_query_len = CPU, 8, 1
    runner.input_buffers = InputBuffers(8, 64, CPU)
    runner.model_state = SimpleNamespace(num_new_sampled_tokens_per_step=1)
    runner.adaptive_verification = runner.fast_prefill = runner.pcp_manager = None
    runner.model_config = SimpleNamespace(rswa_window=None)
    runner.req_states = Mock(num_computed_tokens_np=np.full(8, 5, np.int32))

    def prepare(slots, tokens, padded=0):
        state = Mock(
            req_ids=[f"r{slot}" for slot in slots],
            num_tokens=sum(tokens),
            num_scheduled_tokens=np.array(tokens, np.int32),
            idx_mapping_np=np.array(slots, np.intp),
            has_prefill=False,
            num_draft_tokens_np=None,
        )
        graph = SimpleNamespace(num_tokens=padded, num_reqs=padded or None)
        asked = SimpleNamespace(
            scheduled_spec_decode_tokens={}, has_structured_output_requests=False
        )
        return runner.prepare_inputs(asked, state, graph, 0)

    prepare.runner = runner
    return prepare


def same(one, other):
    assert one.idx_mapping.tolist() == other.idx_mapping.tolist()
    assert one.query_start_loc.tolist() == other.query_start_loc.tolist()
    assert one.query_start_loc_np.tolist() == other.query_start_loc_np.tolist()
    assert one.cu_num_logits.tolist() == other.cu_num_logits.tolist()
    assert one.is_padding.tolist() == other.is_padding.tolist()


def test_repeated_step_copies_nothing(prepare, copies):
    first = prepare([3, 1], [1, 1], padded=4)
    made = len(copies)
    assert made
    same(prepare([3, 1], [1, 1], padded=4), first)
    assert len(copies) == made


@pytest.mark.parametrize(
    "other",
    [([1, 3], [1, 1], 4), ([3, 1], [1, 2], 4), ([3, 1], [1, 1], 2), ([3], [1], 1)],
)
def test_changed_step_is_prepared_anew(prepare, copies, other):
    wanted = prepare(*other)
    expected = [wanted.idx_mapping.tolist(), wanted.query_start_loc.tolist()]
    padding = wanted.is_padding.tolist()
    prepare([3, 1], [1, 1], padded=4)
    made = len(copies)
    got = prepare(*other)
    assert len(copies) > made
    assert [got.idx_mapping.tolist(), got.query_start_loc.tolist()] == expected
    assert got.is_padding.tolist() == padding
    made = len(copies)
    prepare(*other)
    assert len(copies) == made


def test_dummy_batch_between_makes_the_next_step_write_again(prepare, copies):
    first = prepare([3, 1], [1, 1], padded=4)
    kept = first.query_start_loc.tolist(), first.is_padding.tolist()
    made = len(copies)
    prepare([3, 1], [1, 1], padded=4)
    assert len(copies) == made  # reused, until
    InputBatch.make_dummy(3, 6, prepare.runner.input_buffers)
    again = prepare([3, 1], [1, 1], padded=4)
    assert (again.query_start_loc.tolist(), again.is_padding.tolist()) == kept


def test_hidden_states_that_are_all_wanted_are_not_gathered(prepare):
    runner = prepare.runner
    runner.batch_sharder = runner.rejection_sampler = None
    runner.model, runner.sampler = Mock(), Mock()
    hidden = torch.arange(12.0).view(6, 2)
    runner.sample(hidden, prepare([3, 1], [1, 1], padded=4), None)
    (given,) = runner.model.compute_logits.call_args.args
    assert given.tolist() == hidden[:2].tolist()
    assert given.data_ptr() == hidden.data_ptr()
    some = prepare([3, 1], [2, 1])
    some.logits_indices = torch.tensor([1, 2])
    runner.sample(hidden, some, None)
    (given,) = runner.model.compute_logits.call_args.args
    assert given.tolist() == hidden[1:3].tolist()


@pytest.fixture
def sampler(request, monkeypatch):
    """A sampler without GPU, with so many custom logits processors."""
    module = "vllm.v1.worker.gpu.sample.sampler"
    states = ("Sampling", "Penalties", "LogitBias", "BadWords", "ThinkingBudget")
    for kind in (*states, "LogprobTokenIds", "LogitsProcRequest"):
        name = f"{kind}State" + ("s" if kind == "Sampling" else "")
        state = Mock(add_request=Mock(return_value=False))
        monkeypatch.setattr(f"{module}.{name}", Mock(return_value=state))
    config = SimpleNamespace(reasoning_config=None)
    processors = [Mock(add_request=Mock(return_value=False))] * request.param
    sampler = Sampler(config, 4, 32, CPU, Mock(), custom_logits_processors=processors)
    sampler.needs_logits_processing = np.zeros(4, bool)
    return sampler


@pytest.mark.parametrize("sampler", [0], indirect=True)
@pytest.mark.parametrize(
    ("temperatures", "logprobs", "taken"),
    [((0, 0), False, True), ((0, 0.7), False, False), ((0, 0), True, False)],
)
def test_greedy_requests_take_the_largest_logit(sampler, temperatures, logprobs, taken):
    sampler._sample_random = Mock(return_value="by the kernel")
    sampler.sampling_states.temperature.np = np.array([9, *temperatures], np.float32)
    later = "has_topp_only_rows" in inspect.getsource(sampler_module)  # from 0.33 on it returns a third value
    sampler.sampling_states.get_top_k_top_p.return_value = (None, None, False)[: 3 if later else 2]
    logits = torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 4.0]])
    slots = np.array([1, 2])
    arguments = (logits, None, None, slots, None, None, None, None)
    got = sampler.sample(*arguments, return_logprobs=logprobs)
    if taken:
        assert got[0].tolist() == [1, 0]
        assert got[1] is logits
    else:
        assert got == "by the kernel"


@pytest.mark.parametrize(("sampler", "custom"), [(0, 0), (1, 1)], indirect=["sampler"])
def test_sampling_parameters_are_copied_when_a_request_comes(sampler, custom):
    copied = sampler.sampling_states.apply_staged_writes
    sampler.add_request(0, Mock())
    for _ in range(3):
        sampler.apply_staged_writes()
    assert copied.call_count == (3 if custom else 1)
    sampler.add_request(1, Mock())
    sampler.apply_staged_writes()
    assert copied.call_count == (4 if custom else 2)
