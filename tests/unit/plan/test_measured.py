"""The last measured speed: which result counts, and when it is far under the plan."""

import json
import os

import pytest

from sparkforge.core import paths
from sparkforge.models import recipes
from sparkforge.plan import devices, planner, speed
from sparkforge.plan.architecture import BF16, DenseFormat
from sparkforge.plan.budget import Workload
from validate.facts import machine
from validate.facts.target import Options, Target

MODEL = planner.read_subject("gpt-oss-120b", recipes.load()).model


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


def test_the_newest_result_counts_by_its_own_time():
    write("batch_isl1024/result_a.json", result(machine__measured_at="2026-11-21T09:00:00+00:00"))
    write("accepted/result_b.json", result(metrics__tpot_ms={"median": 30.0}), age=500)
    measured = speed.newest("gpt-oss-120b")
    assert (measured.file, measured.tpot_ms) == ("result_b.json", 30.0)


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
def test_a_result_that_is_not_ours_does_not_count(case):
    write("result.json", result(**NOT_OURS[case]))
    assert speed.newest("gpt-oss-120b") is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 50_000,
    ],
)
def test_files_that_are_no_results_do_not_matter(text):
    write("broken.json", text)
    write("result.json", result())
    assert speed.newest("gpt-oss-120b").file == "result.json"


def compared(more, dense=BF16):
    write("result.json", result(**more))
    served = Workload(context=8192, dense=dense)
    comparisons = list(speed.compare(MODEL, devices.named("spark"), speed.newest("gpt-oss-120b"), served))
    return "; ".join(row.told for row in comparisons), "".join(row.causes for row in comparisons)


@pytest.mark.parametrize(
    ("more", "told", "causes"),
    [
        ({}, "decode 50.0 tok/s each", ""),
        ({"metrics__tpot_ms": {"median": 54.0}}, "34%", "MARLIN"),  # 18.5 of 54 tok/s
        ({"metrics__tpot_ms": {"median": 38.5}}, "48%", "MARLIN"),  # 26 tok/s: a Spark stuck at 700 MHz
        ({"metrics__ttft_ms": {"median": 2_200.0}}, "9.4 times", ""),
        ({"metrics__ttft_ms": {"median": 2_600.0}}, "first token", "JIT"),  # the floor is 235 ms
        ({"metrics__tpot_ms": None}, "first token", ""),
        ({"config__conc": 16, "metrics__tpot_ms": {"median": 110.0}, "metrics__ttft_ms": {"median": 2_600.0}}, "", ""),
    ],
)
def test_far_under_the_plan_names_the_likely_causes(more, told, causes):
    sentence, likely = compared(more)
    assert told in sentence
    assert (causes in likely) if causes else not likely


def test_the_ceiling_is_that_of_the_formats_that_are_served():
    slow = {"metrics__tpot_ms": {"median": 28.0}}  # 35.7 tok/s: 66 % of 54, 37 % of 97
    sentence, likely = compared(slow, DenseFormat("mxfp4", "fp8"))
    assert "dense layers in mxfp4, fp8 head" in sentence
    assert likely
    assert not compared(slow)[1]


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
