"""The rules, on hand-written facts instead of compiled files."""

import dataclasses

import pytest

from sparkforge.audit.cubins import Binary, Cubin, Kernel, compiles, loads
from sparkforge.audit.elf import Host
from sparkforge.audit.rules import PATH, judge, judge_modules, load
from sparkforge.core.errors import InputError

RULES = load()
GEMM = (
    "_ZN7cutlass13device_kernelI17GroupProblemShape13CollectiveMmaMainloopSm120ArrayTmaWarpSpecializedBlockScaled_e2m1E"
)
QMMA, E2M1, TRAP = "QMMA.SF.16832.F32.E4M3.E2M1.E8", "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C", "BPT.TRAP"
HMMA, UNPACK = "HMMA.16816.F32.BF16", "F2FP.F16.E4M3.UNPACK_B"
HOST = Host(
    machine="aarch64", shared=True, soname="", needed=("libc.so.6", "libcudart.so.13"), runpath=("$ORIGIN/../lib",),
    glibc=(2, 39), executable_stack=False,
    undefined=("TVMFFIGetTypeInfo", "cudaMalloc", "_ZSt21ios_base_library_initv"),
    exports=frozenset({"PyInit__C"}), cubins=1, ptx=(),
)  # fmt: skip


def file(*kernels, target="sm_121a", path="x.so", strings=(), host=None, sm=121):
    cubin = Cubin("x.1.cubin", target, sm, 1000, loads(target, "12.1"), len(kernels), 100, kernels, strings)
    return Binary(path, 1000, host, (cubin,))


def rules_of(binary, **options):
    return [violation.rule for violation in judge(binary, RULES, **options)]


def test_which_targets_load_on_12_1_and_which_ptx_the_driver_compiles():
    others = ("sm_120a", "sm_90a", "sm_90", "sm_100f", "sm_110", "", "sm_122", "sm_120+sm_121a")
    fitting = ("sm_121a", "sm_121f", "sm_121", "sm_120", "sm_120f")
    assert [target for target in (*fitting, *others) if loads(target, "12.1")] == list(fitting)
    others = ("compute_120a", "compute_90a", "compute_100f", "compute_122", "compute_130", "compute_")
    fitting = ("compute_80", "compute_120", "compute_121a", "compute_120f")
    assert [target for target in (*fitting, *others) if compiles(target, "12.1")] == list(fitting)


SM100_STUB = "GroupProblemShape_CollectiveMma_MainloopSm100ArrayTma_e2m1"
TRAPS = {"strings": RULES.sass.trap_strings}
CODE = {
    "hardware FP4": ([(GEMM, {QMMA: 16}), ("cvt_fp16_to_fp4", {E2M1: 4}), ("scale", {})], {}, []),
    "MMA without block scales": ([(GEMM, {"QMMA.16832.F32.E4M3.E2M1": 64, HMMA: 64})], {}, ["software-fp4"]),
    "a conversion without E2M1": ([("_Z15cvt_fp32_to_fp4PK6float2Ph", {})], {}, ["software-fp4"]),
    "the same under a plain label": ([("_Z15cvt_fp32_to_fp4PK6float2Ph", {})], {"target": "sm_120"}, ["arch-suffix"]),
    "nothing but a trap": ([(GEMM, {TRAP: 1})], {}, ["trap-stub"]),
    "a stub's text and a trap": ([("dense_gemm", {TRAP: 1})], TRAPS, ["trap-string"]),
    "the text, and a trap of another device": ([("20MacheteCollectiveMma_machete", {TRAP: 1})], TRAPS, []),
    "the text and no trap": ([("scale", {})], TRAPS, []),
    "a stub of another device": ([(SM100_STUB, {TRAP: 14})], {"target": "sm_120f"}, []),
    "FP4 in the file's name alone": ([("quantise", {})], {"path": "nvfp4_quant.o"}, ["software-fp4"]),
    "no FP4 in the file's name": ([("quantise", {})], {"path": "bf16_quant.o"}, []),
    "no kernel": ([], {"path": "fp8_fp4.o"}, []),
    "no target": ([], {"target": ""}, ["no-target", "wrong-arch"]),
}  # fmt: skip


@pytest.mark.parametrize(("kernels", "options", "expected"), CODE.values(), ids=CODE)
def test_machine_code_is_judged_by_its_instructions(kernels, options, expected):
    assert rules_of(file(*(Kernel(mangled, 900, counts) for mangled, counts in kernels), **options)) == expected


def test_grouped_gemm_with_too_few_block_scaled_mma_is_software():
    (violation,) = judge(file(Kernel(GEMM, 3000, {QMMA: 15})), RULES)
    assert violation.rule == "software-fp4"
    assert "15 x" in violation.detail
    assert "compute_121 assembled as sm_121a" in violation.detail
    assert "arch=compute_121a,code=sm_121a" in violation.fix


@pytest.mark.parametrize(
    ("changes", "rule", "detail"),
    [
        ({"needed": ("libfoo.so.1",)}, "needed", "libfoo.so.1"),
        ({"needed": ("libcudart.so.12",)}, "needed", "libcudart.so.12"),
        ({"runpath": ("/opt/cuda/lib64",)}, "runpath", "/opt/cuda/lib64"),
        ({"glibc": (2, 40)}, "glibc", "2.40"),
        ({"executable_stack": True}, "executable-stack", "executable stack"),
        ({"undefined": ("_Z7missingv",)}, "undefined", "_Z7missingv"),
        ({"soname": "other.so"}, "swapped-library", "other.so"),
    ],
)
def test_host_part(changes, rule, detail):
    good = file(path="x.so", host=HOST)
    assert rules_of(good) == []
    (violation,) = judge(dataclasses.replace(good, host=dataclasses.replace(HOST, **changes)), RULES)
    assert violation.rule == rule
    assert detail in violation.detail


def test_a_foreign_file_is_not_judged_by_the_rules_of_our_image():
    """bitsandbytes 0.50.2 and torchao 0.18.0 have parts that our image's rules would refuse."""
    host = dataclasses.replace(
        HOST, needed=("libcudart.so.12",), runpath=("/opt/cuda",), undefined=("THPGeneratorClass",), soname="a.so.1",
        exports=frozenset(),
    )  # fmt: skip
    plain = file(Kernel("gemm_4bit", 16, {TRAP: 1}), target="sm_121", path="torchao/_C_mxfp8.abi3.so", host=host)
    assert len(rules_of(plain)) == 6
    assert rules_of(plain, ours=False) == []
    newer = dataclasses.replace(plain, host=dataclasses.replace(host, glibc=(2, 40)))
    assert rules_of(newer, ours=False, machine="x86_64") == ["swapped-library", "glibc"]


def test_ptx_that_the_driver_compiles_is_enough_for_a_foreign_file_only():
    """torchao 0.18.0 has sm_100 and PTX for 12.0, xformers 0.0.35 sm_90a and PTX for 8.0."""
    binary = file(target="sm_100", host=dataclasses.replace(HOST, ptx=("compute_120",)))
    assert rules_of(binary, ours=False) == []
    (violation,) = judge(binary, RULES)
    assert violation.rule == "wrong-arch"
    assert "sm_100, PTX for compute_120" in violation.detail
    assert "none of it loads" not in violation.detail
    older = dataclasses.replace(binary, host=dataclasses.replace(HOST, ptx=("compute_90a",)))
    (violation,) = judge(older, RULES, ours=False)
    assert "none of it loads on 12.1" in violation.detail
    for target in ("compute_90", "compute_121"):  # PTX alone, which proves nothing about machine code
        (violation,) = judge(Binary("x.so", 1000, dataclasses.replace(HOST, ptx=(target,)), ()), RULES)
        assert violation.rule == "wrong-arch"
        assert f"{target} and no machine code" in violation.detail


def test_swapped_libraries():
    for path in ("vllm/_C.abi3.so", "cached_ops/sampling/sampling.so"):
        assert rules_of(file(path=path, host=HOST)) == []
    for path in ("vllm/_moe_C.abi3.so", "cached_ops/sampling/page.so"):
        assert rules_of(file(path=path, host=HOST)) == ["swapped-library"]
    assert rules_of(file(host=HOST), machine="aarch64") == []
    assert rules_of(file(host=HOST), machine="x86_64") == ["swapped-library"]


PREFILL = "_ZN10flashinfer34BatchPrefillWithPagedKVCacheKernelILb0E13__nv_bfloat16S4_S4_fi13AttentionSinkLb1EE{}"
PREFILL_FP8 = PREFILL.replace("S4_S4_", "13__nv_fp8_e4m3S4_")


@pytest.mark.parametrize(
    ("module", "kernels", "kept"),
    [
        ("attention_sink_prefill", [Kernel(PREFILL.format(n), 900, {HMMA: 34}) for n in range(36)], True),
        ("attention_sink_prefill", [Kernel(PREFILL.format(n), 900, {HMMA: 34}) for n in range(35)], False),
        ("attention_sink_prefill", [Kernel(PREFILL.format(n), 900, {HMMA: 4}) for n in range(36)], False),
        ("attention_sink_prefill", [Kernel(PREFILL_FP8.format(n), 900, {HMMA: 34}) for n in range(36)], False),
        ("attention_sink_prefill_fp8", [Kernel(PREFILL_FP8.format(n), 900, {HMMA: 34}) for n in range(36)], True),
        ("attention_sink_prefill_fp8", [Kernel(PREFILL.format(n), 900, {HMMA: 34}) for n in range(36)], False),
        ("xqa_decode", [Kernel("_Z10kernel_mhaj", 4432, {HMMA: 68})], True),
        ("xqa_decode", [Kernel("_Z10kernel_mhaj", 4432, {})], False),
        ("xqa_decode_fp8", [Kernel("_Z10kernel_mhaj", 4208, {HMMA: 52, UNPACK: 192})], True),
        ("xqa_decode_fp8", [Kernel("_Z10kernel_mhaj", 4432, {HMMA: 68})], False),
    ],
)  # fmt: skip
def test_an_attention_module_is_told_by_its_kernels(module, kernels, kept):
    name = RULES.modules[module].file.replace("*", "x")
    violations = judge_modules([file(*kernels, path=name)], [module], RULES)
    assert [violation.rule for violation in violations] == ([] if kept else ["swapped-library"])


def test_named_modules():
    good = file(Kernel(GEMM, 3000, {QMMA: 64}), path="a/fused_moe_120_fp8xfp4.so")
    assert judge_modules([good], ["fused_moe_120"], RULES) == []
    (missing,) = judge_modules([file(path="sampling.so")], ["fused_moe_120"], RULES)
    assert (missing.rule, missing.fix) == ("missing-module", "./inv build.kernels")
    other = file(Kernel("sampling", 300, {}), path="a/fused_moe_120_fp8xfp4.so")
    (swapped,) = judge_modules([other], ["fused_moe_120"], RULES)
    assert swapped.rule == "swapped-library"


def test_a_mistake_in_the_rules_is_named(tmp_path):
    path, text = tmp_path / "rules.toml", PATH.read_text(encoding="utf-8")
    for old, new in (
        ("[sass]", "[sass"), ("schema = 1", "schema = 2"), ("glibc = [2, 39]", "glibc = [2, 1e999]"),
        ("'e2m1|fp4", "'(e2m1|fp4"),
    ):  # fmt: skip
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(InputError, match=r"rules\.toml"):
            load(path)
