"""The last measured speed: the result that counts, speeds far below the plan, and figures of a load."""

import contextlib
from types import SimpleNamespace

import pytest

from sparkforge.bench import load, schema
from sparkforge.bench.load import FinishedLoad, Sample
from sparkforge.core import paths
from sparkforge.core.errors import RefusalError
from sparkforge.models import recipes
from sparkforge.plan import devices, planner, speed
from sparkforge.plan.architecture import BF16, DenseFormat
from sparkforge.plan.budget import Workload
from sparkforge.plan.speed import Measured
from validate.facts import machine
from validate.facts.target import Options, Target

LOAD = Workload(context=8192, dense=BF16)
MODEL = planner.read_subject("gpt-oss-120b", recipes.load()).model


def write(name, result):
    schema.write(paths.state() / "bench" / name, result)


def machine_at(hour):
    return {"machine": {"measured_at": f"2026-11-21T{hour:02}:00:00+00:00"}}


def test_the_newest_result_counts_by_its_own_time(make_result):
    for name, text in (("broken.json", "{"), ("deep.json", "[" * 50_000)):
        (paths.state() / "bench").mkdir(exist_ok=True)
        (paths.state() / "bench" / name).write_text(text)
    write("batch_isl1024/result_a.json", make_result(**machine_at(9)))
    write("accepted/result_b.json", make_result(speed=2.0, **machine_at(10)))
    write("batch_isl1024/result_c.json", make_result(**machine_at(8)))
    measured = schema.newest_speed("gpt-oss-120b")
    assert (measured.where, measured.concurrency) == ("result_b.json", 4)
    assert measured.tpot_ms == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"passed": False}, {"metrics": None}, {"model": "tiny-gpt-oss"}, {"url": "http://10.0.0.7:8000"},
        {"server": {"model": "m", "device": "embedded"}}, {"tp": 2},
    ],
    ids=str,
)  # fmt: skip
def test_results_of_others_do_not_count(make_result, change):
    result = make_result(**{name: value for name, value in change.items() if name not in {"model", "url", "tp"}})
    config = {name: value for name, value in change.items() if name in {"model", "url", "tp"}}
    write("result.json", result.model_copy(update={"config": result.config.model_copy(update=config)}))
    assert schema.newest_speed("gpt-oss-120b") is None


def compared(ttft=400.0, tpot=20.0, concurrency=1, dense=BF16):
    measured = Measured(1024, 128, concurrency, ttft, tpot, where="result.json")
    comparisons = list(speed.compare(MODEL, devices.named("spark"), measured, Workload(context=8192, dense=dense)))
    return "; ".join(row.told for row in comparisons), "".join(row.causes for row in comparisons)


def test_a_speed_below_35_percent_is_refused_by_plan():
    best = next(speed.compare(MODEL, devices.named("spark"), Measured(1024, 128, 1, 400.0, 1.0), LOAD)).computed
    for share, is_refused in ((0.34, True), (0.36, False), (0.7, False)):
        measured = Measured(1024, 128, 1, 400.0, 1000.0 / (share * best), where="result.json")
        plan = SimpleNamespace(measured=list(speed.compare(MODEL, devices.named("spark"), measured, LOAD)))
        with pytest.raises(RefusalError, match="34%") if is_refused else contextlib.nullcontext():
            planner.require_speed(plan)


@pytest.mark.parametrize(
    ("measured", "sentence", "causes"),
    [
        ({}, "result.json: decode 50.0 tok/s each", ""),
        ({"tpot": 54.0}, "34%", "MARLIN"),  # 18.5 of 54 tok/s
        ({"tpot": 38.5}, "48%", "MARLIN"),  # 26 tok/s: a Spark stuck at 700 MHz
        ({"ttft": 2_200.0}, "9.4 times", ""),
        ({"ttft": 2_600.0}, "first token", "JIT"),  # the floor is 235 ms
        ({"tpot": None}, "first token", ""),
        ({"concurrency": 16, "tpot": 110.0, "ttft": 2_600.0}, "", ""),
        ({"tpot": 28.0}, "66%", ""),  # 35.7 tok/s
        ({"tpot": 28.0, "dense": DenseFormat("mxfp4", "fp8")}, "40% of the computed ceiling of 89", "MARLIN"),
        ({"tpot": 28.0, "dense": DenseFormat("mxfp4", "fp8")}, "dense layers in mxfp4, fp8 head", "MARLIN"),
    ],
)
def test_far_under_the_plan_names_the_likely_causes(measured, sentence, causes):
    told, likely = compared(**measured)
    assert sentence in told
    assert (causes in likely) if causes else not likely


@pytest.mark.parametrize(
    ("arguments", "variables", "formats"),
    [
        ("--quantization-config.linear fp8_per_channel", {}, ["fp8", "bf16"]),
        ('--quantization-config={"linear":{"weight":"fp8_per_block_static"}}', {}, ["fp8", "bf16"]),
        ("--quantization-config {", {}, ["bf16", "bf16"]),
        ("--x", {"SPARK_MXFP4_LINEAR": "fp8", "SPARK_MXFP4_LM_HEAD": "mxfp4"}, ["fp8", "mxfp4"]),
        ("--x", {"SPARK_MXFP4_LM_HEAD": "nonsense"}, ["bf16", "bf16"]),
        ('--quantization-config={"linear":"fp8_per_channel","lm_head":{"weight":"mxfp4"}}', {}, ["fp8", "mxfp4"]),
    ],
)
def test_the_formats_that_flags_and_variables_ask_for(arguments, variables, formats):
    target = Target(Options(serve_args=tuple(arguments.split()), environ=variables), "spark")
    assert machine.dense_format(target) == formats


def sample(**changes):
    values = {"ttft": 0.5, "latency": 1.4, "gaps": [0.1] * 9, "pieces": 10, "prompt_tokens": 24, "output_tokens": 10}
    return Sample(**{**values, "wanted_tokens": 10, **changes})


def test_figures_follow_vllms_definitions(config):
    finished = FinishedLoad([sample(), sample(ttft=0.3, latency=1.2)], 2.0)
    figures = load.compute_metrics(finished, config.model_copy(update={"tp": 2}))
    assert figures.tpot_ms.median == pytest.approx(100)  # (1.4 - 0.5) / 9
    assert figures.interactivity == pytest.approx(10)
    assert (figures.ttft_ms.median, figures.ttft_ms.p99) == pytest.approx((400, 498))  # numpy's percentile
    assert figures.e2el_ms.mean == pytest.approx(1300)
    assert figures.output_throughput == pytest.approx(10)
    assert figures.total_token_throughput == pytest.approx(34)
    assert figures.tput_per_gpu == pytest.approx(17)
    impossible = load.check_load(FinishedLoad([sample(latency=9.0)], 1.0), config)
    assert not next(check for check in impossible if check.name == "times are possible").ok


def test_nothing_is_divided_by_nothing(config):
    for finished in (FinishedLoad([], 0.0), FinishedLoad([sample(error="x")], 1.0), FinishedLoad([sample()], 0.0)):
        assert load.compute_metrics(finished, config) is None
        assert not all(check.ok for check in load.check_load(finished, config))
