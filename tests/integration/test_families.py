"""Families by tiny random checkpoints: vLLM's CPU build gives transformers' greedy tokens, and proves itself."""

import os
import sys
import time
from pathlib import Path

import pytest
import tiny_families

from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.core.process import spawn, started_at, terminate_session
from sparkforge.image.devices import EMBEDDED
from sparkforge.plan import architecture, families
from sparkforge.serve import proof
from sparkforge.serve.devices import embedded
from sparkforge.serve.plan import StartPlan

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(600)]
TOKENS = 24
PROMPTS = ["The weather in Paris", "def f(x):\n    return", "\u00e9\u00e8 1 2 3"]


@pytest.fixture(scope="module", params=tiny_families.CONFIGS)
def served(request, tmp_path_factory, free_port):
    """A family's name, the folder of its tiny checkpoint, and a server of it in float32."""
    work, port = tmp_path_factory.mktemp(request.param), free_port()
    folder = tiny_families.write(work / "model", request.param)
    plan = StartPlan(EMBEDDED, model=str(folder), port=port, flags=("--dtype=float32",))
    launch = embedded.Embedded(plan, Path(sys.executable)).launch()
    assert launch.family == request.param
    environment = {**os.environ, **launch.environment, "PYTHONPATH": str(ROOT)}
    pid = spawn(launch.command, log=work / "log", env=environment, cwd=work)
    started, endpoint = started_at(pid), Endpoint(f"http://127.0.0.1:{port}", "model", key="")
    try:
        up = endpoint.wait_until_serving(time.monotonic() + 500, lambda: started_at(pid) == started)
        assert up, (work / "log").read_text(errors="replace")[-3000:]
        yield request.param, folder, endpoint
    finally:
        terminate_session(pid)


def test_greedy_tokens_are_those_of_transformers_in_float32(served):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, folder, endpoint = served
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        scores = model.generate(
            ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, return_dict_in_generate=True
        ).sequences[0, ids.shape[1] :]
        response = endpoint.complete(
            prompt, max_tokens=TOKENS, min_tokens=TOKENS, temperature=0, return_token_ids=True, logprobs=0
        )
        assert response["choices"][0]["token_ids"] == scores.tolist()


def test_it_proves_what_clients_call(served):
    name, _, endpoint = served
    # Random weights would write white space, or calls, for ever, which the grammar allows: they end where they may.
    bias = {
        **dict.fromkeys(map(str, b" \t\n\r"), -proof.ALWAYS),
        str(tiny_families.COMMON["eos_token_id"]): proof.ALWAYS,
    }
    added = {**families.load()[name].chat.request, "logit_bias": bias}
    faults = {call: proof.fault_of(call, endpoint, 120, added=added) for call in proof.REQUESTS}
    assert faults == dict.fromkeys(proof.REQUESTS, "")


def test_its_bytes_are_those_of_the_plan(served):
    name, folder, _ = served
    model = architecture.read(folder)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert model.family == name
    assert abs(stored - model.weight_bytes()) < 20_000  # the file's header
    assert families.load()[name].tiny == ""
