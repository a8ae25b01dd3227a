"""Decode and prefill bounds against figures worked out by hand, and forecasts of our kernels against measurements."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.core.paths import ROOT
from sparkforge.models import recipes as models
from sparkforge.plan import devices, forecast, roofline
from sparkforge.plan.architecture import DenseFormat, Draft, parse
from sparkforge.plan.budget import Workload
from sparkforge.plan.roofline import Work

BIG = parse(models.load()["gpt-oss-120b"].config, "test")
SPARK = devices.table()["spark"]
EXPERT = 2_880 * 2_880 * 3 * 17 / 32 + 2 * 3 * 2_880  # bytes of one expert with its biases
ATTENTION = 36 * 2 * (2_880 * 5_120 + 5_120 + 4_096 * 2_880 + 2_880 + 64)  # with sinks
ROUTER, NORMS, HEAD = 36 * 2 * (128 * 2_880 + 128), 73 * 2_880 * 2, 201_088 * 2_880 * 2


def test_one_token_of_gpt_oss_120b_reads_four_experts_a_layer():
    work = roofline.decode(BIG, 1, Workload(1_000))
    cache = 18 * 2_048 * (1_000 + 128)
    own = 2 * 2_880 + 36 * 2_048  # the token's embedding, keys and values
    assert work.bytes == pytest.approx(36 * 4 * EXPERT + ATTENTION + ROUTER + NORMS + HEAD + cache + own, rel=1e-12)
    experts = 2 * 36 * 4 * 3 * 2_880 * 2_880
    dense = 2 * (36 * (2_880 * 5_120 + 4_096 * 2_880 + 128 * 2_880) + 201_088 * 2_880)
    scores = 4 * 64 * 64 * 18 * (1_001 + 128)
    assert (work.expert_flops, work.dense_flops) == (experts, dense + scores)
    took = roofline.time(work, SPARK)
    assert took.bound == "memory"
    assert 1 / took.seconds == pytest.approx(273e9 / work.bytes)
    assert 54 < 1 / took.seconds < 55


def test_experts_touched_by_even_routing():
    for tokens, hit in ((1, 4.0), (4, 15.26), (16, 50.97), (64, 111.2), (100_000, 128.0)):
        assert roofline.experts_touched(128, 4, tokens) == pytest.approx(hit, abs=0.05)


def test_a_prompt_in_one_step_by_hand():
    (work,) = roofline.prefill(BIG, 4_096, 1, Workload(1))
    hit = 128 * (1 - (1 - 4 / 128) ** 4_096)
    own = 4_096 * (2 * 2_880 + 36 * 2_048)
    assert work.bytes == pytest.approx(36 * hit * EXPERT + ATTENTION + ROUTER + NORMS + HEAD + own, rel=1e-12)
    full = sum(range(1, 4_097))
    window = sum(min(position, 128) for position in range(1, 4_097))
    scores = 4 * 64 * 64 * 18 * (full + window)
    dense = 4_096 * 2 * 36 * (2_880 * 5_120 + 4_096 * 2_880 + 128 * 2_880) + 2 * 201_088 * 2_880
    assert work.dense_flops == dense + scores
    seconds = work.expert_flops / 214e12 + work.dense_flops / 213e12
    took = roofline.time(work, SPARK)
    assert took.compute == pytest.approx(seconds)
    assert took.seconds == max(took.memory, took.compute)


@settings(max_examples=60, deadline=None)
@given(prompt=st.integers(1, 3_000), prompts=st.integers(1, 4), chunk=st.integers(1, 2_000))
def test_steps_of_a_prompt_add_up_to_the_whole(prompt, prompts, chunk):
    whole = list(roofline.prefill(BIG, prompt, prompts, Workload(1, batched=prompts * prompt)))
    steps = list(roofline.prefill(BIG, prompt, prompts, Workload(1, batched=chunk)))
    assert len(whole) == 1
    assert len(steps) == -(-prompt * prompts // chunk)
    for name in ("expert_flops", "dense_flops"):
        assert sum(getattr(step, name) for step in steps) == pytest.approx(getattr(whole[0], name), rel=1e-9)
    assert sum(step.bytes for step in steps) >= whole[0].bytes * (1 - 1e-12)


def test_a_device_of_unknown_rates_has_no_prefill_bound():
    card = devices.table()["rtx-5090"]
    assert roofline.first_token_seconds(BIG, card, 1_024, 1, Workload(1)) is None
    assert roofline.time(roofline.decode(BIG, 1, Workload(1)), card).bound == "memory?"
    blind = card.model_copy(update={"bandwidth": None})
    took = roofline.time(roofline.decode(BIG, 1, Workload(1)), blind)
    assert (took.seconds, took.bound) == (None, "?")


def test_what_a_step_must_gain_before_a_draft_pays_by_hand():
    """A step of one token reads 4 experts a layer. After three draft steps, a step verifies 4 tokens: 15.3 experts."""
    draft, load = Draft(method="eagle3", tokens=3, passes=3, bytes=10**9, source="by hand"), Workload(1_000)
    plain, verified = roofline.decode(BIG, 1, load), roofline.decode(BIG, 1, load, tokens=4)
    experts = 36 * EXPERT * (128 * (1 - (1 - 4 / 128) ** 4) - 4)
    assert verified.bytes - plain.bytes == pytest.approx(experts + 3 * (2 * 2_880 + 36 * 2_048))
    assert verified.expert_flops == 4 * plain.expert_flops
    assert roofline.break_even(BIG, SPARK, 1, load, draft) == pytest.approx((verified.bytes + 3e9) / plain.bytes)


MEASURED = json.loads((ROOT / "spark_mxfp4" / "bench" / "results" / "layer-48-paced-h100.json").read_text())


@pytest.mark.parametrize(
    ("name", "model"),
    [("gpt-oss-120b", BIG), ("16 experts", replace(BIG, experts=16, top_k=2, hidden=6_144, intermediate=2_048))],
)
def test_a_layer_forecast_equals_the_measurement_with_limited_memory(name, model):
    model = replace(model, expert_layers=1)
    rows = [row for row in MEASURED[name] if row.get("chosen")]
    assert rows
    for row in rows:
        size = row["experts_hit"] * model.expert * 17 / 32
        step = forecast.step(model, SPARK, Work(size, 0, 0, size, row["tokens"]))
        assert step.experts * 1e6 == pytest.approx(row["us"], rel=0.007), row
        assert (step.dense, step.link) == (0, 0)


def test_a_token_in_four_bits_takes_its_bytes_and_the_h100s_overhead():
    work = roofline.decode(BIG, 1, Workload(1_024, dense=DenseFormat("mxfp4", "mxfp4")))
    step = forecast.step(BIG, SPARK, work)
    assert step.experts == pytest.approx(36 * 5.6e-6 + work.expert_bytes / (234e9 * 0.998))
    assert step.dense == pytest.approx((work.bytes - work.expert_bytes) / (234e9 * 0.94))
    assert step.rest == pytest.approx(36 * 28.9e-6)
    assert 73 < 1 / step.seconds < 76


def test_an_expert_with_more_tokens_than_a_tile_is_read_again():
    for tokens, readings in ((512, 1), (1_024, 1), (2_048, 1.5), (8_192, 4.5)):
        share = SPARK.kernels.experts.at(tokens / 32)
        step = forecast.step(replace(BIG, expert_layers=0), SPARK, Work(1e9, 0, 0, 1e9, tokens))
        assert step.experts == pytest.approx(readings / (234 * share), rel=0.001)


def test_what_our_kernels_do_not_run_has_no_forecast():
    load = Workload(1_024)
    assert forecast.step(BIG, devices.table()["h200"], roofline.decode(BIG, 1, load)) is None
    for name in ("qwen3-0.6b", "deepseek-v4-flash"):  # dense; latent attention
        other = parse(models.load()[name].config, "test")
        assert forecast.step(other, SPARK, roofline.decode(other, 1, load)) is None
        assert forecast.prefill_seconds(other, SPARK, 1_024, load) is None
