"""The build's benchmark without any compiler: which parts there are, and what counts as which kind of unit."""

import json
from collections import Counter
from fnmatch import fnmatch

import pytest

from lab import build
from sparkforge.core.errors import UsageError
from sparkforge.core.paths import ROOT

# As FlashInfer 0.7.0.post1 names the units of its unfiltered fused_moe_120: file, and how many of that form.
UPSTREAM = (
    ("120_cutlass_kernel_file_gemm_grouped_sm120_M128_BS_group{}.generated.cuda.o", 11),
    ("80_cutlass_kernel_file_gemm_grouped_sm80_M16_group{}.generated.cuda.o", 9),
    ("90_cutlass_kernel_file_gemm_sm90_M128_group{}.generated.cuda.o", 48),
    ("moe_gemm_moe_gemm_kernels_bf16_{}.cuda.o", 14),
    ("cutlass_backend_cutlass_fused_moe_instantiation.cuda.o", 1),
    ("cutlass_backend_flashinfer_cutlass_fused_moe_binding.cuda.o", 1),
    ("common_memoryUtils{}.cuda.o", 6),
    ("common_logger{}.o", 6),
)


def test_each_unit_of_upstream_is_of_the_kind_that_it_is_counted_as():
    counted = Counter()
    for form, number in UPSTREAM:
        for index in range(number):
            counted[next(kind for kind, pattern, _ in build.KINDS if fnmatch(form.format(index), pattern))] += 1
    assert list(counted.values()) == [number for _, number in UPSTREAM]
    assert sum(counted.values()) == 96


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(UsageError, match="whole, experts, ccache"):
        build.main(str(tmp_path / "r.json"), "speed", "", "")
    assert not (tmp_path / "r.json").exists()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with the manifest of a build whose every unit was compiled."""
    monkeypatch.setenv("BENCH_BUILT", "1")
    facts = {"compiled": 80, "cached": 0, "units": 80, "cpu_seconds": 1380.0, "server": {"CXX": "/usr/bin/g++"}}
    manifest = {"facts": facts, "seconds": 900.5}
    (tmp_path / "kernels-gpt-oss.env.manifest.json").write_text(json.dumps(manifest))
    return build.BuildSite(tmp_path, tmp_path / "python")


def test_a_whole_build_of_before_counts(site):
    figures = build.whole(site)
    assert (figures["cpu_seconds"], figures["wall_seconds"], figures["compiled"]) == (1380.0, 900.5, 80)
    assert "before this" in figures["source"]
    assert "server" not in figures  # it has paths of the machine


def test_a_build_that_ccache_helped_is_no_whole_one(site):
    file = site.output / "kernels-gpt-oss.env.manifest.json"
    manifest = json.loads(file.read_text())
    manifest["facts"] |= {"compiled": 79, "cached": 1}
    file.write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="1 of 80 units came from ccache"):
        build.whole(site)
    file.unlink()
    with pytest.raises(UsageError, match="nothing is built"):
        build.whole(site)


def test_what_was_saved_has_no_path_of_the_machine_and_says_how_busy_it_was():
    saved = ROOT / "bench/results/build.json"
    text = saved.read_text()
    assert not any(prefix in text for prefix in ("/tmp/", "/root", "/home/", "/sys/"))
    for part, figures in json.loads(text).items():
        assert part in build.PARTS
        assert len(figures["machine"]["load_before"]) == 3
