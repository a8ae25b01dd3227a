"""Real vLLM with our experts against transformers' float32 model of the same checkpoint."""

import json
import os
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration
HERE = Path(__file__).parent
GENERATED = 8
# Lengths below and above the sliding window of 128 tokens.
PROMPTS = [[200006, *((i * 7919 + seed * 104729) % 199998 for i in range(n))] for seed, n in enumerate((9, 40, 150))]


@pytest.fixture(scope="module")
def engine(random_model, tmp_path_factory, request):
    engines = {"float32", "bfloat16"} | {
        item.callspec.params["name"] for item in request.session.items
        if item.module is request.module and "name" in getattr(item, "fixturenames", ())
    }  # fmt: skip
    work = tmp_path_factory.mktemp("numerics")
    (work / "prompts.json").write_text(json.dumps(PROMPTS))
    log, environment = work / "log", {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE)))}
    with log.open("wb") as output:
        files = (random_model, work / "prompts.json", work / "out.json")
        command = [sys.executable, HERE / "numerics_engine.py", *files, *engines]
        result = subprocess.run(command, env=environment, stdout=output, stderr=output, cwd=work, check=False)
    output_text = log.read_text(errors="replace")
    assert result.returncode == 0, output_text[-3000:]
    return SimpleNamespace(runs=json.loads((work / "out.json").read_text()), log=output_text)


@pytest.fixture(scope="module")
def reference(random_model):
    """Return a function: ids → log-probabilities of ids[1:] and of the best token at each position, each [tokens - 1].

    The reference is transformers' own gpt-oss in float32.
    """
    from transformers import AutoModelForCausalLM, Mxfp4Config

    # transformers dequantises to bfloat16, which holds every E2M1 product with these scales exactly.
    loaded = AutoModelForCausalLM.from_pretrained(
        random_model, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    return cache(partial(log_probabilities, loaded.float().eval()))  # cached, because most runs give the same tokens


@torch.no_grad()
def log_probabilities(loaded, ids):
    expected = loaded(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return expected.gather(1, torch.tensor(ids)[1:, None])[:, 0], expected.max(-1).values


def differences(reference, completion):
    """Return |logprob - reference| of every token but the first, and each generated token's margin to the best."""
    chosen, best = reference(tuple(completion["ids"]))
    return (torch.tensor(completion["logprobs"]) - chosen).abs(), (best - chosen)[-GENERATED:]


def check_float32(reference, completions):
    for completion in completions:
        assert max(part.max() for part in differences(reference, completion)) <= 1e-4


PADDED = "Using 'SPARK_NUMERICS_KERNELS:PADDED' Mxfp4 MoE backend (dequant)."


@pytest.mark.parametrize(
    ("name", "logged"),
    [
        ("float32", "Using 'SPARK_TORCH' Mxfp4 MoE backend (packed)."),
        pytest.param("float32 dequant padded", PADDED, marks=pytest.mark.nightly),
        pytest.param("float32 traced", "", marks=pytest.mark.nightly),
    ],
)
def test_float32_logprobs_equal_the_reference(engine, reference, name, logged):
    check_float32(reference, engine.runs[name])
    assert logged in engine.log


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "second"), [("two ranks, tensor", "Worker_TP1 pid="), ("two ranks, expert", "Worker_TP1_EP1 pid=")]
)
def test_two_ranks_together_equal_the_reference(engine, reference, name, second):
    """Two real processes share the layers' columns or the experts."""
    check_float32(reference, engine.runs[name])
    (pid,) = set(re.findall(rf"\({second}(\d+)\)", engine.log))
    (first,) = set(re.findall(rf"\({second.replace('1', '0')}(\d+)\)", engine.log))
    assert pid != first


def test_bfloat16_chooses_the_best_token_or_one_that_ties_with_it(engine, reference):
    # bfloat16 has 8 bits, so near-equal logits may swap and near-equal router scores may select another expert. Single
    # logprobs may change by some tenths, but not the mean, and each chosen token must be within rounding of the best.
    for completion in engine.runs["bfloat16"]:
        difference, gap = differences(reference, completion)
        assert difference.mean() < 0.15
        assert gap.max() < 0.3


GPT_OSS = SimpleNamespace(model_type="gpt_oss")


@pytest.mark.parametrize(
    ("method", "asked", "config", "stock", "claimed"),
    [
        ("mxfp4", "spark-mxfp4", GPT_OSS, True, True), ("gpt_oss_mxfp4", "spark-mxfp4", GPT_OSS, False, True),
        ("mxfp4", None, GPT_OSS, False, True), ("mxfp4", None, GPT_OSS, True, False),
        ("mxfp4", "mxfp4", GPT_OSS, False, False), ("fp8", None, GPT_OSS, False, False),
        ("mxfp4", None, SimpleNamespace(model_type="llama"), False, False), ("mxfp4", None, None, False, False),
    ],
)  # fmt: skip
def test_a_checkpoint_is_claimed_when_asked_or_where_stock_vllm_has_no_backend(
    monkeypatch, method, asked, config, stock, claimed
):
    from spark_mxfp4.vllm import plugin as vllm_plugin

    monkeypatch.setattr(vllm_plugin, "stock_has_backend", lambda: stock)
    got = vllm_plugin.SparkMxfp4Config.override_quantization_method({"quant_method": method}, asked, hf_config=config)
    assert got == ("spark-mxfp4" if claimed else None)


def test_unknown_modes_are_refused(monkeypatch):
    from spark_mxfp4.vllm.plugin import SparkMxfp4Config

    monkeypatch.setenv("SPARK_MXFP4_MODE", "unpacked")
    with pytest.raises(ValueError, match="SPARK_MXFP4_MODE is 'unpacked' · it must be one of packed, dequant"):
        SparkMxfp4Config.from_config({})
