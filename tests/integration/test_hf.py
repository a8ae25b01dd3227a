"""transformers with our experts on the tiny checkpoint: the unmodified model's tokens and logits, by all three ways."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spark_mxfp4 import hf
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration
# Lengths below and above the sliding window of 128 tokens.
PROMPTS = [[200006, *((i * 7919 + seed * 104729) % 199998 for i in range(n))] for seed, n in enumerate((9, 300))]
GENERATED = 16


@pytest.fixture(scope="module")
def checkpoint(random_model):
    return random_model


def unmodified(checkpoint, dtype=torch.float32):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    # transformers dequantises to bfloat16, which holds every E2M1 product with these scales exactly.
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    return model.to(dtype).eval()


@torch.no_grad()
def answers(model):
    results = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        tokens = model.generate(ids, max_new_tokens=GENERATED, do_sample=False, eos_token_id=None)
        results.append((model(ids).logits[0], tokens[0].tolist()))
    return results


@pytest.fixture(scope="module")
def wanted(checkpoint):
    return answers(unmodified(checkpoint))


WAYS = {
    "converted": lambda checkpoint: hf.convert_and_replace(unmodified(checkpoint)),
    "packed": lambda checkpoint: hf.load_packed(
        str(checkpoint), dtype=torch.float32, attn_implementation="eager"
    ).eval(),
    "chosen": lambda checkpoint: chosen(unmodified(checkpoint)),
}


def chosen(model):
    model.set_experts_implementation("spark_mxfp4")
    return model


@pytest.mark.parametrize("way", WAYS)
def test_logits_and_greedy_tokens_are_the_unmodified_models(checkpoint, wanted, way):
    for (logits, tokens), (expected, expected_tokens) in zip(answers(WAYS[way](checkpoint)), wanted, strict=True):
        assert tokens == expected_tokens
        assert len(tokens) > GENERATED
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_packed_model_holds_and_saves_the_checkpoints_bytes(checkpoint, tmp_path):
    stored = {key: value for path in checkpoint.glob("*.safetensors") for key, value in load_file(path).items()}
    model = hf.load_packed(str(checkpoint))
    state = model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[key], stored[key]) for key in stored)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[key], stored[key]) for key in stored)


def test_converting_costs_less_than_one_layer_at_its_peak():
    """In a process of its own: resident memory at its highest, above the start."""
    script = Path(__file__).parent / "convert_peak.py"
    # Tensors above 1 MiB then go back to the system as soon as they are freed (mallopt(3)).
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    layer, peak, after, total = map(int, done.stdout.split())
    assert 0 < peak < layer
    assert after < -0.65 * total  # 16 bits became 4.25: -0.73; one layer of eight that stays makes -0.61
