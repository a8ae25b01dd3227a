"""A config.json's weights and KV cache, against figures worked out by hand and checkpoints' real sizes."""

import pytest
from expected import refused

from sparkforge.models import recipes as models
from sparkforge.plan import architecture
from sparkforge.plan.architecture import parse

KNOWN = models.load()
BIG = parse(KNOWN["gpt-oss-120b"].config, "test")


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gpt-oss-20b"])
def test_the_sum_is_the_checkpoints_own_size(name):
    assert parse(KNOWN[name].config, name).weight_bytes() == KNOWN[name].tensor_bytes
    assert KNOWN[name].source
    assert KNOWN[name].tensor_bytes_source


def test_kv_cache_of_gpt_oss_120b():
    assert BIG.kv_layer_token("bf16") == 2 * 8 * 64 * 2 == 2_048
    assert BIG.kv_layer_token("fp8") == 1_024
    assert (BIG.full_layers, BIG.sliding_layers) == (18, 18)
    assert BIG.kv_read(10_000, "bf16") == 18 * 2_048 * (10_000 + 128)
    assert BIG.kv_read(100, "bf16") == 36 * 2_048 * 100
    # 10,000 tokens: 625 blocks of 16; of the window 127 and 2 in flight: 9 blocks, and one as it begins anywhere.
    assert BIG.kv_held(10_000, "bf16") == 18 * 16 * 2_048 * (625 + 10)
    # 127 + 2 * 4096 tokens: 520 blocks and one.
    assert BIG.kv_admitted(32_768, 2 * 4_096, "bf16") == 18 * 16 * 2_048 * (2_048 + 521)


def test_padding_of_gpt_oss_120b_for_cutlass():
    padded = 36 * 128 * (2_944 * 2_944 * 3 * 17 // 32 + (2 * 2_944 + 2_944) * 2)
    plain = 36 * 128 * (2_880 * 2_880 * 3 * 17 // 32 + (2 * 2_880 + 2_880) * 2)
    assert BIG.padding_bytes(128) == padded - plain
    assert BIG.padding_bytes(1) == BIG.padding_bytes(64) == 0


WRONG = {
    "another architecture": ({"model_type": "llama"}, "another architecture"),
    "zero experts": ({"num_local_experts": 0}, "num_local_experts makes no sense"),
    "a size that is text": ({"hidden_size": "2880"}, "hidden_size makes no sense"),
    "a size that is true": ({"vocab_size": True}, "vocab_size makes no sense"),
    "a size that is no number": ({"vocab_size": float("nan")}, "vocab_size makes no sense"),
    "a size that is missing": ({"hidden_size": None}, "hidden_size makes no sense"),
    "a size that is absurd": ({"hidden_size": 10**30}, "hidden_size makes no sense"),
    "more experts a token than there are": ({"num_experts_per_tok": 200}, "makes no sense"),
    "heads that do not divide": ({"num_key_value_heads": 7}, "makes no sense"),
    "a hidden size without whole blocks": ({"hidden_size": 2_890}, "makes no sense"),
    "layer types of another length": ({"layer_types": ["full_attention"]}, "layer_types makes no sense"),
    "layer types of another kind": ({"layer_types": ["mamba"] * 36}, "layer_types makes no sense"),
    "another quantization": ({"quantization_config": {"quant_method": "awq"}}, "format is not known"),
    "quantization that is a list": ({"quantization_config": [1]}, "format is not known"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_configuration_that_makes_no_sense_is_named(case):
    changed, message = WRONG[case]
    with refused("input.config", message) as caught:
        parse({**KNOWN["gpt-oss-120b"].config, **changed}, "x/config.json")
    assert caught.value.fix
    assert "x/config.json" in caught.value.what


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"model_type": "gpt_oss"', b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b" " * 10_000_001],
    ids=["empty", "cut", "cut later", "list", "number", "no text", "deep", "long"],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    for path in (tmp_path, tmp_path / "config.json"):
        with refused("input.config"):
            architecture.read(path)
