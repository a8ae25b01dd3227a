"""Families as tiny random checkpoints: vLLM's CPU build gives transformers' greedy tokens and passes the test calls."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import tiny_families
from serving import serving

from sparkforge.core import openai
from sparkforge.core.paths import ROOT
from sparkforge.core.vllm_flags import SPECULATION
from sparkforge.image.devices import EMBEDDED
from sparkforge.plan import architecture, families
from sparkforge.serve import proof, status
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(600)]
TOKENS = 24
PROMPTS = ["The weather in Paris", "def f(x):\n    return", "\u00e9\u00e8 1 2 3"]
# vLLM's linear attention on a CPU is bf16 only, so its log probabilities are close to those of float32, not equal.
FLAGS = {"qwen3_5-moe": ("--dtype=bfloat16", "--language-model-only")}
NEAR = {"qwen3_5-moe": 0.4}


@contextlib.contextmanager
def serving_family(family, work, port, *flags, pack=None):
    """The folder of a family's tiny checkpoint, and a server of it."""
    folder = tiny_families.write(work / "model", family)
    if pack:
        tiny_families.pack_experts(folder, pack)
    flags = (*FLAGS.get(family, () if pack else ("--dtype=float32",)), *flags)
    plan = StartPlan(EMBEDDED, model=str(folder), port=port, flags=flags)
    launch = in_environment.Embedded(plan, Path(sys.executable)).launch()
    assert launch.family == family
    with serving(launch, "model", work, (ROOT, tiny_families.write_torchvision(work))) as endpoint:
        yield folder, endpoint


@pytest.fixture(scope="module", params=tiny_families.CONFIGS)
def served(request, tmp_path_factory, free_port):
    with serving_family(request.param, tmp_path_factory.mktemp(request.param), free_port()) as (folder, endpoint):
        yield request.param, folder, endpoint


def greedy(endpoint):
    asked = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    return [endpoint.complete(prompt, **asked)["choices"][0]["token_ids"] for prompt in (*PROMPTS, "1 2 3 1 2 3 1")]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_speculation_gives_the_same_greedy_tokens_in_fewer_steps(method, tmp_path, free_port):
    lookup = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    if method == "draft_model":  # the model itself as draft, so that every proposal is accepted
        lookup = {"model": str(tiny_families.write(tmp_path / "draft", "qwen3"))}
    if method == "eagle3":
        lookup = {"model": str(tiny_families.write_eagle3(tmp_path / "draft"))}
    config = json.dumps({"method": method, "num_speculative_tokens": 3, **lookup})
    with serving_family("qwen3", tmp_path, free_port()) as (_, endpoint):
        plain = greedy(endpoint)
    with serving_family("qwen3", tmp_path, free_port(), f"{SPECULATION}={config}") as (_, endpoint):
        assert greedy(endpoint) == plain
        names = (status.DRAFTS, status.ACCEPTED)
        drafts, accepted = (sum(openai.metric_values(endpoint.get("/metrics").text, names)[name]) for name in names)
    assert drafts > 0
    assert accepted == 3 * drafts if method == "draft_model" else accepted <= 3 * drafts
    assert accepted > 0 or method == "eagle3"


def test_greedy_tokens_are_those_of_transformers_in_float32(served):
    family, folder, endpoint = served
    compare(family, folder, endpoint, NEAR.get(family, 1e-4))


def test_experts_in_mxfp4_run_on_our_kernels_by_the_familys_row(tmp_path, free_port):
    with serving_family("qwen3-moe", tmp_path, free_port(), pack=tmp_path / "reference") as (_, endpoint):
        compare("qwen3-moe", tmp_path / "reference", endpoint, 0.1)
    assert "Using 'SPARK_TORCH' Mxfp4 MoE backend" in (tmp_path / "log").read_text()


def compare(family, folder, endpoint, near):
    """Compare a server's greedy tokens and log probabilities with those of the checkpoint in float32."""
    torch = pytest.importorskip("torch")
    import transformers

    (architecture,) = tiny_families.CONFIGS[family]["architectures"]
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        response = endpoint.complete(
            prompt, max_tokens=TOKENS, min_tokens=TOKENS, temperature=0, return_token_ids=True, logprobs=0
        )
        tokens = torch.tensor(response["choices"][0]["token_ids"])
        ids = torch.cat([tokenizer(prompt, return_tensors="pt").input_ids[0], tokens])
        with torch.no_grad():
            expected = model(ids[None]).logits[0, -TOKENS - 1 : -1].log_softmax(-1)
        chosen = expected[range(TOKENS), tokens]
        reported = torch.tensor(response["choices"][0]["logprobs"]["token_logprobs"])
        assert (expected.max(-1).values - chosen).max() < near
        assert (reported - chosen).abs().max() < near


def test_it_proves_what_clients_call(served):
    name, _, endpoint = served
    # Random weights would write endless white space or calls, which the grammar allows, so the end token is preferred.
    bias = {
        **dict.fromkeys(map(str, b" \t\n\r"), -proof.MAX_BIAS),
        str(tiny_families.COMMON["eos_token_id"]): proof.MAX_BIAS,
    }
    added = {**families.load()[name].chat.request, "logit_bias": bias}
    faults = {call: proof.fault_of(call, endpoint, 120, added=added) for call in proof.REQUESTS}
    assert faults == dict.fromkeys(proof.REQUESTS, "")


def test_weight_bytes_equal_the_plans(served):
    from safetensors.torch import load_file

    name, folder, _ = served
    model = architecture.read(folder)
    tensors = load_file(folder / "model.safetensors")
    assert model.family == name
    stored = sum(tensor.nbytes for key, tensor in tensors.items() if "visual" not in key)
    assert abs(model.weight_bytes() - stored) < 100  # a router's bias, which the plan counts in float32
    assert families.load()[name].tiny == ""
