"""`./inv plan` from arguments to tables and JSON: recommendations, refusals, and the generated page."""

import json
import re
from dataclasses import replace

import pytest
from expected import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkforge.bench import baselines
from sparkforge.cli import program
from sparkforge.core import tables
from sparkforge.core.errors import InputError, UsageError
from sparkforge.models import recipes as models
from sparkforge.plan import devices, planner, screen
from sparkforge.plan.document import Plan
from sparkforge.plan.planner import PlanRequest
from sparkforge.serve import profiles

KNOWN, PROFILES, FIGURES = models.load(), profiles.load_options(), baselines.load().figures


def show(capsys, model="gpt-oss-120b", **options):
    subject = planner.read_subject(model, KNOWN)
    screen.report(PlanRequest(model, **options), subject, PROFILES, FIGURES, as_json=True)
    return Plan.model_validate_json(capsys.readouterr().out)


def test_the_command_prints_a_plan_as_json_and_nothing_else(capsys):
    assert program.main(["plan", "gpt-oss-120b", "--nodes", "2", "--json"]) == 0
    printed = capsys.readouterr()
    plan = Plan.model_validate_json(printed.out)
    assert printed.err == ""
    assert (plan.established, plan.recommended, plan.fit.fits) == ("computed", "safe", True)
    assert plan.model.computed == plan.model.on_disk == 65_248_815_744
    assert sum(row.bytes for row in plan.budget) + plan.left_bytes == plan.memory_bytes
    assert plan.cluster.nodes == 2


RECOMMENDED = [
    ({}, "safe"), ({"concurrency": "18", "context": "32768"}, "safe"), ({"concurrency": "19"}, "fast"),
    ({"context": "32769", "concurrency": "1"}, "long-context"), ({"context": "131072", "concurrency": "7"}, ""),
    ({"context": "131072", "concurrency": "10", "kv_dtype": "fp8"}, "long-context"), ({"concurrency": "73"}, ""),
    ({"resident": "30", "concurrency": "64"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "name"), RECOMMENDED)
def test_recommended_profile(capsys, arguments, name):
    shown = show(capsys, **arguments)
    assert shown.recommended == name
    assert (f"--profile {name}" in shown.advice) == bool(name)
    for verdict in shown.profiles:
        too_small = verdict.share > verdict.most or verdict.needed > verdict.share
        asked = shown.asked
        beyond = asked.context > verdict.max_model_len or asked.concurrency > verdict.max_num_seqs
        assert bool(verdict.against) == (too_small or beyond)


def plan_for(request, device):
    subject = planner.read_subject(request.model, KNOWN)
    load = planner.read_load(request, subject.model, device, PROFILES)
    return planner.make_plan(subject, device, load, PROFILES, request)


def test_this_machine_is_measured(capsys):
    shown = show(capsys, model="tiny-gpt-oss", device="this")
    figures = shown.device.described
    assert figures.memory.source.startswith(tables.MEASURED)
    assert figures.memory.value > 0.5
    assert shown.decode[0].each is None or shown.decode[0].each > 1


def test_a_gpu_of_the_table_keeps_its_figures_and_takes_the_memory_that_is_there():
    device = devices.describe("NVIDIA GB10", 121 << 30, 100 << 30, None)
    assert (device.memory.value, device.resident.value, device.bandwidth.value) == (121.0, 21.0, 273.0)
    assert devices.by_gpu("NVIDIA H200").memory.value == 139.8
    assert devices.by_gpu("NVIDIA H100 80GB HBM3").bandwidth.value == 3_350.0
    assert devices.by_gpu("NVIDIA B200").rates["fp4"].value == 9_000.0
    assert devices.by_gpu("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition").bandwidth.value == 1_792.0
    assert devices.by_gpu("NVIDIA A100-SXM4-80GB") is None
    with pytest.raises(UsageError, match="A100"):
        devices.describe("NVIDIA A100-SXM4-80GB", 121 << 30, 100 << 30, None)


@settings(max_examples=40, deadline=None)
@given(
    context=st.integers(1, 131_072), concurrency=st.integers(1, 500), device=st.sampled_from(["spark", "rtx-pro-6000"])
)
def test_the_advice_for_too_little_memory_fits(context, concurrency, device):
    request, on = PlanRequest("gpt-oss-120b", device, str(context), str(concurrency)), devices.named(device)
    plan = plan_for(request, on)
    if plan.fit.fits:
        return
    with refused("validation.too-large") as caught:
        planner.require_fit(plan)
    assert caught.value.fix == plan.advice
    for flag, value in re.findall(r"(--(?:context|concurrency|kv-dtype)) (\S+)", plan.advice):
        changed = replace(request, **{flag.removeprefix("--").replace("-", "_"): value})
        assert plan_for(changed, on).fit.fits, flag


BAD = {
    "no such model": ({"model": "gpt-5"}, InputError),
    "a model of nobody's home": ({"model": "~nobody-at-all/x"}, InputError),
    "a model of too long a name": ({"model": "x" * 5_000}, InputError),
    "a model with a zero byte": ({"model": "x\0y"}, InputError),
    "no such device": ({"device": "tpu"}, UsageError),
    "zero context": ({"context": "0"}, UsageError),
    "context beyond the model": ({"context": "131073"}, UsageError),
    "endless context": ({"context": "9" * 5_000}, UsageError),
    "concurrency of another script": ({"concurrency": "\u0661"}, UsageError),
    "too many at once": ({"concurrency": "100001"}, UsageError),
    "one machine": ({"nodes": "1"}, UsageError),
    "a fraction of a machine": ({"nodes": "2.5"}, UsageError),
    "unknown type": ({"kv_dtype": "int4"}, UsageError),
    "negative resident": ({"resident": "-1"}, UsageError),
    "resident that is no number": ({"resident": "nan"}, UsageError),
}


@pytest.mark.parametrize(("arguments", "kind"), BAD.values(), ids=BAD)
def test_bad_words_are_named(capsys, arguments, kind):
    with pytest.raises(kind):
        show(capsys, **arguments)


def test_a_folder_is_planned_for_with_its_files_sizes(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["gpt-oss-20b"].config))
    (tmp_path / "model-00000-of-00000.safetensors").write_bytes(bytes(1_000))
    shown = show(capsys, model=str(tmp_path))
    assert (shown.model.on_disk, shown.model.computed) == (1_000, 13_761_264_768)
    assert shown.cited == []


def test_the_plan_says_up_to_how_many_tokens_our_experts_read_each_weight_once(capsys):
    for model, device, tokens in (("gpt-oss-120b", "spark", 1024), ("gpt-oss-20b", "spark", 256),
                                  ("gpt-oss-120b", "h200", None)):  # fmt: skip
        assert show(capsys, model, device=device).few_tokens == tokens


def test_tables_name_every_part(capsys):
    request = PlanRequest("openai/gpt-oss-120b", concurrency="2", kv_dtype="fp8")
    subject = planner.read_subject(request.model, KNOWN)
    screen.report(request, subject, PROFILES, FIGURES, as_json=False)
    printed = capsys.readouterr()
    assert printed.out == ""
    for word in (
        "computed, not measured", "up to 1,024 tokens", "lm_head", "KV cache", "fits", "even routing", "prefill",
        "safe", "SGLang", "with our kernels", "72.7",
    ):  # fmt: skip
        assert word in printed.err


def test_a_draft_takes_memory_and_pays_above_the_break_even(capsys):
    plain, drafted = show(capsys), show(capsys, draft="eagle3")
    first = drafted.speculation.rows[0]
    assert plain.speculation is None
    assert plain.left_bytes - drafted.left_bytes == drafted.speculation.draft.bytes == 615_260_160
    assert (first.dense, first.batch) == ("bf16/bf16", 1)
    assert 4.0 < first.break_even < 4.1
    assert first.gains == tuple(tokens / first.break_even for tokens in planner.ACCEPTED)
    fewer = show(capsys, draft="eagle3:3").speculation
    assert (fewer.draft.tokens, fewer.draft.passes) == (3, 3)
    assert 2.3 < fewer.rows[0].break_even < 2.4
    assert fewer.rows[0].gains[-2:] == (None, None)  # a step gives at most three drafted tokens and the model's own
    block = planner.read_draft("ngram:5", planner.read_subject("qwen3-0.6b", KNOWN))
    assert (block.tokens, block.passes) == (5, 0)


def test_the_draft_of_a_plan_is_what_vllm_is_told_and_one_that_makes_no_sense_is_named(capsys):
    for draft in ("x", "eagle3:", "eagle3:0", "eagle3:33", "eagle3:-1", ":"):
        with pytest.raises(UsageError, match="--draft"):
            show(capsys, draft=draft)
    draft = planner.read_draft("eagle3:3", planner.read_subject("gpt-oss-120b", KNOWN))
    profile = dict(flag.partition("=")[::2] for flag in PROFILES["safe-eagle3"].arguments)
    assert json.loads(draft.flag().partition("=")[2].strip("'")) == json.loads(profile["--speculative-config"])
