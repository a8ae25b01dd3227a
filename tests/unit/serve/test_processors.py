"""What the embedded device does on processors of each kind; their /proc/cpuinfo is a fake."""

import platform
from contextlib import nullcontext

import pytest

from sparkforge.core.errors import UsageError
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve.devices import in_environment
from sparkforge.serve.record import StartPlan
from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts import machine
from validate.facts.fact import Fact

AVX512 = "fpu sse4_2 avx avx2 fma avx512f avx512bw avx512vl avx512_vnni"
# name: architecture, flags, whether it serves an FP8 cache, whether it is slow
PROCESSORS = {
    "AVX2": ("x86_64", "fpu sse4_2 avx avx2 fma", False, True),
    "AVX-512": ("x86_64", AVX512, True, False),
    "arm64": ("aarch64", "fp asimd crc32 atomics", False, True),
    "arm64 with BF16": ("aarch64", "fp asimd crc32 atomics asimddp bf16 i8mm", False, False),
}


@pytest.mark.parametrize(("architecture", "flags", "fp8", "slow"), PROCESSORS.values(), ids=PROCESSORS)
def test_a_profile_that_needs_more_is_refused_and_a_slow_processor_is_a_warning(
    monkeypatch, tmp_path, architecture, flags, fp8, slow
):
    (tmp_path / "proc").mkdir()
    name = "flags" if architecture == "x86_64" else "Features"
    (tmp_path / "proc" / "cpuinfo").write_text(f"processor\t: 0\n{name}\t\t: {flags}\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: architecture)
    in_environment.Embedded(StartPlan(EMBEDDED, profile="embedded"))
    refusal = pytest.raises(UsageError, match=r"--profile embedded-kv8 cannot be served.*AVX-512 or AMX")
    with nullcontext() if fp8 else refusal:
        in_environment.Embedded(StartPlan(EMBEDDED, profile="embedded-kv8"))
    facts = {"os.machine": Fact(architecture, "t"), "cpu.flags": Fact(flags.split(), "t")}
    finding = evaluate(CHECKS["cpu-instructions"], View(facts))
    assert finding.status is (Status.WARN if slow else Status.PASS)
    facts["serve.args"] = Fact(["--kv-cache-dtype", "fp8_e4m3"], "t")
    assert evaluate(CHECKS["cpu-arguments"], View(facts)).status is (Status.PASS if fp8 else Status.FAIL)


@pytest.mark.parametrize(
    ("cores", "given", "threads"), [(1, None, "1"), (2, None, "1"), (20, None, "19"), (20, "4", "4")]
)
def test_the_engine_leaves_a_core_to_everything_else(monkeypatch, cores, given, threads):
    monkeypatch.setattr(in_environment, "cpus", lambda root: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    described = in_environment.Embedded(StartPlan(EMBEDDED, profile="embedded"))
    assert described.variables()["OMP_NUM_THREADS"] == threads
