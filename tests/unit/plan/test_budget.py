"""A config.json's weights and KV cache, and the memory budget: lines add up, and the predicted maximum fits."""

from dataclasses import replace

import pytest
from expected import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.models import recipes as models
from sparkforge.plan import architecture, budget, devices
from sparkforge.plan.architecture import parse
from sparkforge.plan.budget import Workload
from sparkforge.plan.devices import GIB

KNOWN = models.load()
MODELS = {name: parse(known.config, name) for name, known in KNOWN.items()}
BIG, DEVICES = MODELS["gpt-oss-120b"], devices.table()
LOADS = st.builds(
    Workload, context=st.integers(1, 131_072), concurrency=st.integers(1, 200), kv=st.sampled_from(["bf16", "fp8"]),
    batched=st.sampled_from([2_048, 4_096, 8_192]), sequences=st.sampled_from([16, 64, 1_024]),
)  # fmt: skip
ANY = {"model": st.sampled_from(sorted(MODELS)), "device": st.sampled_from(sorted(DEVICES)), "load": LOADS}


@settings(max_examples=150, deadline=None)
@given(**ANY)
def test_the_lines_sum_to_the_memory(model, device, load):
    lines = budget.make(MODELS[model], DEVICES[device], load)
    assert sum(line.bytes for line in lines.lines) + lines.left == lines.total == DEVICES[device].memory_bytes
    assert all(line.bytes >= 0 for line in lines.lines)


@settings(max_examples=60, deadline=None)
@given(**ANY)
def test_the_predicted_maximum_fits_and_one_more_does_not(model, device, load):
    m, d = MODELS[model], DEVICES[device]
    sequences, tokens = budget.most_sequences(m, d, load), budget.most_tokens(m, d, load)
    if sequences:
        assert budget.fits(m, d, replace(load, concurrency=sequences))
    assert not budget.fits(m, d, replace(load, concurrency=sequences + 1))
    if tokens:
        assert budget.fits(m, d, replace(load, context=tokens))
    assert tokens == m.longest or not budget.fits(m, d, replace(load, context=tokens + 1))
    assert budget.fits(m, d, load) == (budget.missing(m, d, load) <= 0)


def test_gpt_oss_120b_on_a_spark_by_hand():
    load = Workload(32_768, 16, batched=4_096, sequences=16)
    lines = {line.name: line.bytes for line in budget.make(MODELS["gpt-oss-120b"], DEVICES["spark"], load).lines}
    block = 18 * 16 * 2_048
    assert lines["weights"] == 65_248_815_744
    assert lines["KV cache"] == block * (16 * (2_048 + 10) + (2_048 + 521) - (2_048 + 10))
    tokens = 4_096 * (4 * (3 * 2_880 + 2_880) + 80 * 64 + 4 * 2_880)
    assert lines["activations"] == 2 * tokens + 4 * 2 * 16 * 201_088
    assert lines["graphs, workspaces"] == 3.5 * GIB


def test_the_share_is_the_memory_left_by_others():
    spark = DEVICES["spark"]
    for resident, share in ((0.0, 0.87), (6.2, 0.87), (20.0, 0.79), (200.0, 0.0)):
        device = spark.model_copy(update={"resident": spark.resident.model_copy(update={"value": resident})})
        assert budget.most_share(device) == share


def test_kv_cache_of_gpt_oss_120b():
    assert BIG.kv_layer_token("bf16") == 2 * 8 * 64 * 2 == 2_048
    assert BIG.kv_layer_token("fp8") == 1_024
    assert (BIG.full_layers, BIG.sliding_layers) == (18, 18)
    assert BIG.kv_read(10_000, "bf16") == 18 * 2_048 * (10_000 + 128)
    assert BIG.kv_read(100, "bf16") == 36 * 2_048 * 100
    # 10,000 tokens are 625 blocks of 16. The window's 127 tokens and 2 in flight are 9 blocks, plus 1 for alignment.
    assert BIG.kv_held(10_000, "bf16") == 18 * 16 * 2_048 * (625 + 10)
    # 127 + 2 * 4096 tokens are 520 blocks, plus 1.
    assert BIG.kv_admitted(32_768, 2 * 4_096, "bf16") == 18 * 16 * 2_048 * (2_048 + 521)


def test_padding_of_gpt_oss_120b_for_cutlass():
    padded = 36 * 128 * (2_944 * 2_944 * 3 * 17 // 32 + (2 * 2_944 + 2_944) * 2)
    plain = 36 * 128 * (2_880 * 2_880 * 3 * 17 // 32 + (2 * 2_880 + 2_880) * 2)
    assert BIG.padding_bytes(128) == padded - plain
    assert BIG.padding_bytes(1) == BIG.padding_bytes(64) == 0


WRONG = {
    "another architecture": ({"model_type": "llama"}, "unknown architecture"),
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


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
def test_a_configuration_that_makes_no_sense_is_named(changed, message):
    with refused("input.config", message) as caught:
        parse({**KNOWN["gpt-oss-120b"].config, **changed}, "x/config.json")
    assert caught.value.fix
    assert "x/config.json" in caught.value.what


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    file = tmp_path / "config.json"
    for content in (b"", b"{", b'{"model_type": "gpt_oss"', b"[]", b"3", b"\xff\xfe", b"[" * 100_000,
                    b" " * 10_000_001):  # fmt: skip
        file.write_bytes(content)
        for path in (tmp_path, file):
            with refused("input.config"):
                architecture.read(path)
