"""The trained tiny model as committed: small, whole, better than counting, and wrong when its computation is."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch

from spark_mxfp4 import mxfp4
from sparkforge.bench import baselines
from sparkforge.core.errors import InputError
from sparkforge.models import tiny, tiny_format, tiny_trained
from sparkforge.models.harmony import VOCAB_SIZE, special_tokens
from sparkforge.models.training import corpus, export, faults, texts
from sparkforge.models.training.model import GptOss, gains

COMMITTED = 4_000_000  # bytes that the repository gives it at most


@pytest.fixture(scope="module")
def trained():
    return export.unpack()[0].eval()


@pytest.fixture(scope="module")
def scored():
    """The gate's text in rows of the stored vocabulary; training's part of the corpus is not needed to score."""
    rows = export.unpack()[1]
    row = {token: number for number, token in enumerate(rows.tolist())}
    text = corpus.HELD_OUT.read_text()
    held_out = np.array([row.get(token, 0) for token in corpus.harmony_encode()(text)], np.uint16)
    nothing = np.zeros(0, np.uint16)
    return corpus.Corpus(rows, nothing, nothing, nothing.astype(bool), held_out, len(text.encode()))


@pytest.fixture(scope="module")
def right(trained, scored):
    return faults.bits_per_byte(trained, scored)


@pytest.fixture(scope="module")
def limit():
    return baselines.load().threshold("tiny-gpt-oss", "persuasion-24").at_most["bits_per_byte"]


def facts():
    return tiny_format.from_safetensors(tiny_trained.FILE.read_bytes())[1]


def test_the_file_is_small_and_tells_how_it_was_made():
    assert tiny_trained.FILE.stat().st_size <= COMMITTED
    assert facts().keys() == {"sizes", "plan", "corpus", "made_with", "unigram_bits_per_byte"}


def test_expanded_tensors_have_the_names_types_and_shapes_of_gpt_oss():
    sizes = tiny_trained.sizes()
    hidden, inner, experts = sizes.hidden, sizes.intermediate, sizes.experts
    tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in tiny_trained.tensors()}
    layer = f"model.layers.{sizes.layers - 1}."
    wanted = {
        "model.embed_tokens.weight": ("BF16", (VOCAB_SIZE, hidden)),
        "lm_head.weight": ("BF16", (VOCAB_SIZE, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
        layer + "self_attn.q_proj.weight": ("BF16", (64 * sizes.heads, hidden)),
        layer + "self_attn.k_proj.bias": ("BF16", (64 * sizes.kv_heads,)),
        layer + "self_attn.sinks": ("BF16", (sizes.heads,)),
        layer + "mlp.router.weight": ("BF16", (experts, hidden)),
        layer + "mlp.experts.gate_up_proj_blocks": ("U8", (experts, 2 * inner, hidden // 32, 16)),
        layer + "mlp.experts.gate_up_proj_scales": ("U8", (experts, 2 * inner, hidden // 32)),
        layer + "mlp.experts.gate_up_proj_bias": ("BF16", (experts, 2 * inner)),
        layer + "mlp.experts.down_proj_blocks": ("U8", (experts, hidden, inner // 32, 16)),
        layer + "mlp.experts.down_proj_bias": ("BF16", (experts, hidden)),
    }
    assert {name: tensors[name] for name in wanted} == wanted
    assert len(tensors) == 3 + sizes.layers * (2 + 8 + 1 + 2 + 6)
    written = tiny_format.config(sizes)
    assert (written["hidden_size"], written["num_local_experts"], written["swiglu_limit"]) == (hidden, experts, 7.0)


def test_the_same_bytes_are_written_everywhere():
    # Changes with tiny.safetensors, on purpose only; if its expansion changes alone, raise EXPANSION.
    written = tiny._weight_files(tiny.TRAINED)
    assert {name: hashlib.sha256(data).hexdigest()[:16] for name, data in written.items() if "of-" in name} == {
        "model-00001-of-00002.safetensors": "a8f184651f570030",
        "model-00002-of-00002.safetensors": "6c9e040cb5529276",
    }


def test_every_special_token_that_harmony_writes_has_a_row():
    rows = set(export.unpack()[1].tolist())
    names = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
    assert {special_tokens()[name] for name in names} <= rows


def test_it_speaks_coolly_unless_asked_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "_weight_files", lambda weights: {})  # megabytes, which are not what is asked
    monkeypatch.setattr(tiny, "tokenizer_files", dict)

    def sampling(name, weights):
        return json.loads((tiny.write_tiny(tmp_path / name, weights) / "generation_config.json").read_text())

    assert sampling("trained", tiny.TRAINED)["temperature"] == 0.3
    assert "temperature" not in sampling("random", tiny.RANDOM)


def test_a_damaged_file_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_trained, "FILE", tmp_path / "tiny.safetensors")
    tiny_trained.FILE.write_bytes(b"\x10\0\0\0\0\0\0\0{")
    tiny_trained._stored.cache_clear()
    with pytest.raises(
        InputError,
        match=r"git checkout sparkforge/models/tiny\.safetensors",
        check=lambda error: error.code == "input.model",
    ):
        dict(tiny_trained.tensors())
    tiny_trained._stored.cache_clear()


def test_a_missing_file_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny_trained, "FILE", tmp_path / "tiny.safetensors")
    assert tiny.main([str(tmp_path / "out")]) == InputError.exit_code
    assert "No such file" in capsys.readouterr().err


def test_another_file_makes_older_directories_stale(tmp_path, monkeypatch):
    before = tiny.TRAINED.recipe()
    monkeypatch.setattr(tiny_trained, "FILE", tmp_path / "tiny.safetensors")
    tiny_trained.FILE.write_bytes(b"other")
    assert tiny.TRAINED.recipe() != before


def test_it_predicts_the_held_out_text_far_better_than_counting(right, limit):
    assert right == pytest.approx(1.4140, abs=5e-4)
    assert right < limit
    assert right <= 0.8 * float(facts()["unigram_bits_per_byte"])


def test_random_weights_fail(scored, limit):
    torch.manual_seed(0)
    assert faults.bits_per_byte(GptOss(tiny_trained.sizes(), len(scored.vocabulary)), scored) > 2 * limit


# Of the 32 biases one a layer and projection, which saves minutes; the weakest (layer 3, expert 3) is among them.
KNOWN = faults.known(tiny_trained.sizes())
TRIED = [name for name, fault in KNOWN.items() if fault.no_bias is None or fault.no_bias[0] == fault.no_bias[1]]


@pytest.mark.parametrize("name", TRIED)
def test_every_fault_fails_the_gate(trained, scored, limit, name):
    assert faults.bits_per_byte(trained, scored, KNOWN[name]) > limit


def test_right_requantisation_passes(right, scored, limit):
    """Dequantised to bfloat16, which holds every MXFP4 value, and packed again."""
    again, _ = export.unpack()
    with torch.no_grad():
        for layer in again.each_layer():
            for name, (weight, _) in layer.experts.served().items():
                values = weight.to(torch.bfloat16)
                assert torch.equal(values.float(), weight)
                getattr(layer.experts, name).copy_(mxfp4.dequantize(*mxfp4.quantize(values)) / gains()[name][0])
    bits = faults.bits_per_byte(again, scored)
    assert bits == pytest.approx(right, rel=1e-3)
    assert bits < limit


def test_row_0_is_scored_as_one_of_its_tokens(trained, scored):
    with torch.no_grad():
        logits = trained(torch.zeros(1, 1, dtype=torch.long)).logits[0, 0].double()
    total = torch.logsumexp(torch.cat([logits, logits[:1] + math.log(scored.shared - 1)]), 0)
    losses = faults.losses(logits[None], torch.tensor([0]), scored.shared)
    assert losses.item() == pytest.approx((total - logits[0]).item())


def test_the_held_out_text_is_the_gates():
    (text,) = (text for text in baselines.load().texts if text.name == "persuasion-24")
    assert corpus.HELD_OUT.read_text() == text.read()
    assert texts.HELD_OUT[0] == "persuasion"


def test_sizes_are_those_that_kernels_take():
    sizes = tiny_trained.sizes()
    assert sizes.hidden % 32 == sizes.intermediate % 32 == 0
    assert json.loads(facts()["sizes"]) == sizes._asdict()
