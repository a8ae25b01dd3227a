"""The last measured speed: which result counts, when the check warns, and that cited Spark figures would not."""

import json
import os

import pytest

from sparkforge.core import paths
from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts import machine, measured
from validate.facts.fact import take
from validate.facts.target import Options, Target


def result(**more):
    shape = {"model": "gpt-oss-120b", "url": "http://127.0.0.1:8000", "tp": 1, "isl": 1024, "osl": 128, "conc": 1}
    value = {
        "format": "sparkforge-bench/1", "passed": True, "config": shape, "server": {"device": "docker"},
        "metrics": {"ttft_ms": {"median": 400.0}, "tpot_ms": {"median": 20.0}},
        "machine": {"measured_at": "2026-11-21T10:00:00+00:00"},
    }  # fmt: skip
    for path, changed in more.items():
        holder, _, name = path.rpartition("__")
        (value[holder] if holder else value)[name] = changed
    return value


def write(name, value, age=0):
    file = paths.state() / "bench" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    os.utime(file, (1_000_000 - age, 1_000_000 - age))


def facts(tmp_path, model="gpt-oss-120b"):
    target = Target(Options(model=tmp_path / model), "spark")
    return {reading.name: take(reading, target) for reading in measured.READINGS}


def test_the_newest_result_counts_by_its_own_time(tmp_path):
    write("batch_isl1024/result_a.json", result(machine__measured_at="2026-11-21T09:00:00+00:00"))
    write("accepted/result_b.json", result(metrics__tpot_ms={"median": 30.0}), age=500)
    gathered = facts(tmp_path)
    assert gathered["measured.file"].value == "result_b.json"
    assert gathered["measured.tpot_ms"].value == 30.0


NOT_OURS = {
    "failed": {"passed": False},
    "without figures": {"metrics": None},
    "of another model": {"config__model": "tiny-gpt-oss"},
    "of another machine": {"config__url": "http://10.0.0.7:8000"},
    "of the embedded device": {"server__device": "embedded"},
    "of two GPUs": {"config__tp": 2},
    "of another format": {"format": "something/9"},
    "with a shape of nothing": {"config__isl": 0},
    "with words for numbers": {"metrics__tpot_ms": {"median": "20"}},
}


@pytest.mark.parametrize("case", NOT_OURS)
def test_a_result_that_is_not_ours_does_not_count(tmp_path, case):
    write("result.json", result(**NOT_OURS[case]))
    gathered = facts(tmp_path)
    assert {fact.value for fact in gathered.values()} == {None}
    assert {fact.error for fact in gathered.values()} == {None}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 50_000,
    ],
)
def test_files_that_are_no_results_do_not_matter(tmp_path, text):
    write("broken.json", text)
    write("result.json", result())
    assert facts(tmp_path)["measured.file"].value == "result.json"


def judged(good, tmp_path, **more):
    write("result.json", result(**{"machine__measured_at": "2999-01-01T00:00:00+00:00", **more}))
    return evaluate(CHECKS["measured-speed"], View({**good("spark"), **facts(tmp_path)}))


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ({}, Status.PASS, "decode 50.0 tok/s each"),
        ({"metrics__tpot_ms": {"median": 54.0}}, Status.FAIL, "MARLIN"),  # 18.5 of 54 tok/s
        ({"metrics__tpot_ms": {"median": 38.5}}, Status.WARN, "48%"),  # 26 tok/s: a Spark stuck at 700 MHz
        ({"metrics__ttft_ms": {"median": 2_200.0}}, Status.PASS, "9.4 times"),
        ({"metrics__ttft_ms": {"median": 2_600.0}}, Status.WARN, "JIT"),  # the floor is 235 ms
        ({"metrics__tpot_ms": None}, Status.PASS, "first token"),
        ({"metrics__tpot_ms": {"median": 90.0}, "machine__measured_at": "2001-01-01T00:00:00+00:00"}, Status.WARN,
         "was started since"),
        ({"config__conc": 16, "metrics__tpot_ms": {"median": 110.0}, "metrics__ttft_ms": {"median": 2_600.0}},
         Status.PASS, ""),
    ],
)  # fmt: skip
def test_far_under_the_plan_warns_with_the_likely_causes(good, tmp_path, more, status, message):
    finding = judged(good, tmp_path, **more)
    assert finding.status is status, finding
    assert message in finding.evidence
    assert ("./inv doctor" in finding.fix) == (status is not Status.PASS)
    assert ("-name result.json -delete" in finding.fix) == (status is Status.FAIL)


def test_another_gpu_has_no_ceiling(good, tmp_path, with_values):
    write("result.json", result(metrics__tpot_ms={"median": 9_000.0}))
    sheet = with_values({**good("spark"), **facts(tmp_path)}, {"gpu.name": "NVIDIA A100"})
    finding = evaluate(CHECKS["measured-speed"], View(sheet), required=False)
    assert finding.status is Status.PASS
    assert "no ceiling" in finding.evidence


def test_the_ceiling_is_that_of_the_formats_that_are_served(good, tmp_path, with_values):
    write("result.json", result(metrics__tpot_ms={"median": 28.0}))  # 35.7 tok/s: 66 % of 54, 37 % of 97
    sheet = {**good("spark"), **facts(tmp_path)}
    packed = with_values(sheet, {"serve.dense_format": ["mxfp4", "fp8"]})
    plain, eight_and_four = (
        evaluate(CHECKS["measured-speed"], View(facts), required=False) for facts in (sheet, packed)
    )
    assert (plain.status, eight_and_four.status) == (Status.PASS, Status.WARN)
    assert "dense layers in mxfp4, fp8 head" in eight_and_four.evidence
    wrong = with_values(sheet, {"serve.dense_format": ["int3", "fp8"]})
    assert "no two formats" in evaluate(CHECKS["measured-speed"], View(wrong), required=False).evidence


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
