"""The trained tiny model as committed: small, whole, and the same bytes everywhere."""

import hashlib
import json

import pytest

from sparkforge.core.errors import InputError
from sparkforge.models import tiny, tiny_format, tiny_trained
from sparkforge.models.harmony import VOCAB_SIZE

COMMITTED = 4_000_000  # bytes that the repository gives it at most


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


def test_it_speaks_coolly_unless_asked_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "_weight_files", lambda weights: {})  # megabytes, which are not what is asked
    monkeypatch.setattr(tiny, "tokenizer_files", dict)

    def sampling(name, weights):
        return json.loads((tiny.write_tiny(tmp_path / name, weights) / "generation_config.json").read_text())

    assert sampling("trained", tiny.TRAINED)["temperature"] == 0.3
    assert "temperature" not in sampling("random", tiny.RANDOM)


TENSOR = '"x": {"dtype": %s, "shape": [2], "data_offsets": [0, %d]}'


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"{}",
        b"[" * 5000,
        b'{"__metadata__": {"sizes": "[1]"}}',
        b'{"__metadata__": {"sizes": "{}"}}',
        ('{"__metadata__": {"sizes": "{}"}, ' + TENSOR % ('"F99"', 2) + "}").encode(),
        ('{"__metadata__": {"sizes": "{}"}, ' + TENSOR % ('"U8"', 1) + "}").encode(),
    ],
)
def test_a_damaged_file_is_told(tmp_path, monkeypatch, header):
    monkeypatch.setattr(tiny_trained, "FILE", tmp_path / "tiny.safetensors")
    tiny_trained.FILE.write_bytes(len(header).to_bytes(8, "little") + header)
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
