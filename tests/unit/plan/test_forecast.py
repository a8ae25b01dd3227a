"""What is expected of our kernels on a Spark, against the measurements that it is made of."""

import json
from dataclasses import replace

import pytest

from sparkforge.core.paths import ROOT
from sparkforge.models import recipes as models
from sparkforge.plan import devices, forecast, roofline
from sparkforge.plan.architecture import DenseFormat, parse
from sparkforge.plan.budget import Workload
from sparkforge.plan.roofline import Work

BIG = parse(models.load()["gpt-oss-120b"].config, "test")
SPARK = devices.table()["spark"]
MEASURED = json.loads((ROOT / "spark_mxfp4" / "bench" / "results" / "layer-48-paced-h100.json").read_text())


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt-oss-120b", BIG),
        ("16 experts", replace(BIG, experts=16, top_k=2, hidden=6_144, intermediate=2_048)),
    ],
)
def test_a_layer_takes_as_long_as_it_took_behind_a_memory_as_slow_as_a_sparks(name, model):
    model = replace(model, expert_layers=1)
    rows = [row for row in MEASURED[name] if row.get("chosen")]
    assert rows
    for row in rows:
        size = row["experts_hit"] * model.expert * 17 / 32
        step = forecast.step(model, SPARK, Work(size, 0, 0, size, row["tokens"]))
        assert step.experts * 1e6 == pytest.approx(row["us"], rel=0.007), row
        assert (step.dense, step.link) == (0, 0)


def test_a_token_in_four_bits_is_its_bytes_and_what_the_h100_needs_besides():
    work = roofline.decode(BIG, 1, Workload(1_024, dense=DenseFormat("mxfp4", "mxfp4")))
    step = forecast.step(BIG, SPARK, work)
    assert step.experts == pytest.approx(36 * 5.6e-6 + work.expert_bytes / (234e9 * 0.998))
    assert step.dense == pytest.approx((work.bytes - work.expert_bytes) / (234e9 * 0.94))
    assert step.rest == pytest.approx(36 * 28.9e-6)
    assert 73 < 1 / step.seconds < 76


@pytest.mark.parametrize(("tokens", "readings"), [(512, 1), (1_024, 1), (2_048, 1.5), (8_192, 4.5)])
def test_an_expert_with_more_tokens_than_a_tile_is_read_again(tokens, readings):
    work = Work(1e9, 0, 0, 1e9, tokens)
    share = SPARK.kernels.experts.at(tokens / 32)
    step = forecast.step(replace(BIG, expert_layers=0), SPARK, work)
    assert step.experts == pytest.approx(readings / (234 * share), rel=0.001)


def test_what_our_kernels_do_not_run_has_no_forecast():
    load = Workload(1_024)
    assert forecast.step(BIG, devices.table()["h200"], roofline.decode(BIG, 1, load)) is None
    for name in ("qwen3-0.6b", "deepseek-v4-flash"):  # dense; latent attention
        other = parse(models.load()[name].config, "test")
        assert forecast.step(other, SPARK, roofline.decode(other, 1, load)) is None
        assert forecast.prefill_seconds(other, SPARK, 1_024, load) is None
