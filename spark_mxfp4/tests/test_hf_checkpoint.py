"""Converting and loading give the unmodified model's tokens and logits on a small checkpoint."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import packed_checkpoint
from project import PROJECT
from spark_mxfp4 import hf

SIZES = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 4,
    "pad_token_id": 256, "eos_token_id": None,
}  # fmt: skip
# Lengths below and above the sliding window of 128 tokens.
PROMPTS = [[(i * 7919 + seed * 104729) % SIZES["vocab_size"] for i in range(n)] for seed, n in enumerate((9, 300))]
GENERATED = 16
HERE = Path(__file__).parent
EXAMPLE = PROJECT / "examples" / "convert_gpt_oss.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A packed checkpoint of random bytes, with a tokenizer of single bytes. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    packed_checkpoint.write(folder, deviation=0.25, **SIZES)
    alphabet = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def unmodified(checkpoint, **options):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    # transformers dequantises to bfloat16, which holds every E2M1 product with these scales exactly.
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager", **options
    )
    return model.float().eval()


@torch.no_grad()
def answers(model):
    results = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        tokens = model.generate(ids, max_new_tokens=GENERATED, do_sample=False)
        results.append((model(ids).logits[0], tokens[0].tolist()))
    return results


@pytest.fixture(scope="module")
def wanted(checkpoint):
    return answers(unmodified(checkpoint))


def load_packed(checkpoint, **options):
    return hf.load_packed(str(checkpoint), dtype=torch.float32, attn_implementation="eager", **options).eval()


WAYS = {
    "converted": lambda checkpoint: hf.convert_and_replace(unmodified(checkpoint)),
    "converted, with a device map": lambda checkpoint: hf.convert_and_replace(unmodified(checkpoint, device_map="cpu")),
    "packed": load_packed,
    "packed, to a device": lambda checkpoint: load_packed(checkpoint, device="cpu"),
    "packed, with a device map": lambda checkpoint: load_packed(checkpoint, device_map="cpu"),
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_and_greedy_tokens_are_the_unmodified_models(checkpoint, wanted, way):
    model = WAYS[way](checkpoint)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    for (logits, tokens), (expected, expected_tokens) in zip(answers(model), wanted, strict=True):
        assert tokens == expected_tokens
        assert len(tokens) > GENERATED
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_converting_costs_less_than_one_layer_at_its_peak():
    """Measure the peak of resident memory above the start, in a separate process."""
    layer, peak, after, total = map(int, run_program(HERE / "convert_peak.py").split())
    assert 0 < peak < layer
    assert after < -0.65 * total  # 16 bits become 4.25: -0.73; if one layer of eight stays dense: -0.61


def run_program(*arguments):
    """Run a program with one torch thread; freed large tensors are returned to the system (mallopt(3))."""
    settings = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    return result.stdout


def test_loading_packed_costs_one_layer_above_the_packed_weights(tmp_path):
    layer, peak, end, total = map(int, run_program(HERE / "load_peak.py", tmp_path, "own_kernels:Turned").split())
    assert total <= end < total + layer / 4  # memory has only the kernel's layout, not the checkpoint's bytes
    # One layer in both layouts. The peak is sampled, so a short peak may be missed.
    assert peak < end + 1.1 * layer


def test_the_example_loads_dequantised_converts_and_generates_the_same(checkpoint, tmp_path):
    prompt = "She looked at him and"
    output = run_program(
        EXAMPLE, checkpoint, "--dtype", "float32", "--tokens", 24, "--prompt", prompt, "--save", tmp_path / "saved"
    )
    dense, packed, verdict = output.splitlines()
    assert verdict == "the same tokens"
    # An answer of few different tokens would prove little. Random weights give near ties, so it varies a little.
    assert len(set(ast.literal_eval(dense.partition("tokens ")[2]))) > 4
    wide, small = (float(re.search(r": ([\d.]+) MB", line)[1]) for line in (dense, packed))
    assert small < 0.15 * wide  # 32 bits become 4.25; both numbers include biases
    stored, saved = (
        {key for path in folder.glob("*.safetensors") for key in load_file(path)}
        for folder in (checkpoint, tmp_path / "saved")
    )
    assert stored == saved


def test_offloaded_experts_are_refused_by_name(checkpoint, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    places["model.rotary_emb"] = "cpu"
    with pytest.raises(ValueError, match="offloaded"):
        hf.load_packed(str(checkpoint), device_map=places, offload_folder=str(tmp_path))
