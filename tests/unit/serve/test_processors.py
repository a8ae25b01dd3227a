"""What the embedded device does on processors of each kind; their /proc/cpuinfo is a fake."""

import platform

import pytest

from sparkforge.core.errors import UsageError
from sparkforge.image.devices import EMBEDDED
from sparkforge.serve import profiles
from sparkforge.serve.devices import choose as choose_device
from sparkforge.serve.devices import embedded
from sparkforge.serve.plan import StartPlan
from validate.checks import CHECKS
from validate.checks.finding import Status, View, evaluate
from validate.facts import machine
from validate.facts.fact import Fact

AVX2 = "fpu sse4_2 avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512_vnni"
PROCESSORS = {
    "AVX2": ("x86_64", AVX2),
    "AVX-512": ("x86_64", AVX512),
    "AMX": ("x86_64", f"{AVX512} avx512_bf16 amx_bf16 amx_tile amx_int8"),
    "arm64": ("aarch64", "fp asimd crc32 atomics"),
    "arm64 with BF16": ("aarch64", "fp asimd crc32 atomics asimddp bf16 i8mm"),
    "arm64 with SVE and BF16": ("aarch64", "fp asimd crc32 atomics asimddp sve sve2 bf16 i8mm"),
}
WITH_FP8_CACHE = {"AVX-512", "AMX"}
SLOW = {"AVX2", "arm64"}
NEEDS_FP8_CACHE = {"embedded-kv8"}
OWN = [name for name, profile in profiles.load().items() if profile.device == EMBEDDED]


@pytest.fixture(params=PROCESSORS)
def fake_processor(request, monkeypatch, tmp_path):
    architecture, flags = PROCESSORS[request.param]
    (tmp_path / "proc").mkdir()
    name = "flags" if architecture == "x86_64" else "Features"
    (tmp_path / "proc" / "cpuinfo").write_text(f"processor\t: 0\n{name}\t\t: {flags}\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: architecture)
    return request.param


@pytest.mark.parametrize("profile", OWN)
def test_a_profile_is_served_or_refused_by_name_before_it_starts(fake_processor, profile):
    if profile in NEEDS_FP8_CACHE and fake_processor not in WITH_FP8_CACHE:
        with pytest.raises(UsageError, match=f"--profile {profile} cannot be served.*AVX-512 or AMX"):
            embedded.Embedded(StartPlan(EMBEDDED, profile=profile))
    else:
        embedded.Embedded(StartPlan(EMBEDDED, profile=profile))


def test_a_lack_is_a_warning_with_its_cost_and_a_flag_that_needs_more_is_refused(fake_processor):
    architecture, flags = PROCESSORS[fake_processor]
    facts = {"os.machine": Fact(architecture, "t"), "cpu.flags": Fact(flags.split(), "t")}
    finding = evaluate(CHECKS["cpu-instructions"], View(facts))
    assert finding.status is (Status.WARN if fake_processor in SLOW else Status.PASS)
    assert ("slowly" in finding.evidence) == (fake_processor in SLOW)
    for arguments, needs in (["--kv-cache-dtype", "fp8_e4m3"], True), (["--kv-cache-dtype=auto"], False):
        finding = evaluate(CHECKS["cpu-arguments"], View(facts | {"serve.args": Fact(arguments, "t")}))
        assert finding.status is (Status.FAIL if needs and fake_processor not in WITH_FP8_CACHE else Status.PASS)


def test_without_a_gpu_the_device_is_embedded_on_every_processor(fake_processor, monkeypatch, tmp_path):
    monkeypatch.setattr(choose_device, "NVIDIA_DRIVER", tmp_path / "no driver")
    assert choose_device.choose("auto").device == EMBEDDED
