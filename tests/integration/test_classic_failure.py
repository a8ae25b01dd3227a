"""The three failures of FP4 code for a target without suffix: docs/guide/troubleshooting.md."""

import sys
from pathlib import Path

import pytest
from expected import refused

from sparkforge.compile import toolchain
from sparkforge.compile.ninja import explained
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run

pytestmark = [pytest.mark.integration, pytest.mark.needs("c++")]
UNITS = Path(__file__).with_name("fp4_units.cu")
PAGE = ROOT / "docs" / "guide" / "troubleshooting.md"
OLD, NEW = "Instruction 'cvt with .e2m1x2' not supported", "Feature 'cvt.e2m1x2.f32' not supported"


@pytest.fixture(scope="module")
def home():
    return toolchain.find().home


def ptx(home, folder, target):
    """Return the unit's PTX with another `target`. nvcc lets ptxas check PTX, so compile for 121a, then rename."""
    path = folder / "x.ptx"
    run([home / "bin/nvcc", "-ptx", "-arch", "compute_121a", "-DWITH_INLINE_PTX", UNITS, "-o", path])
    path.write_text(path.read_text().replace(".target sm_121a", f".target {target}"))
    return path


def newer_ptxas():
    """Return the ptxas of CUDA 13.4 in Triton's package for Blackwell."""
    assemblers = list(Path(sys.prefix).glob("lib/python*/site-packages/triton/backends/nvidia/bin/ptxas-blackwell"))
    assert assemblers, "the test environment holds Triton (locks/test.txt)"
    return assemblers[0]


@pytest.mark.parametrize(("which", "wording"), [("13.0", OLD), ("13.1 and later", NEW)])
def test_ptxas_refuses_inline_ptx_and_our_error_says_why(home, tmp_path, which, wording):
    ptxas = home / "bin/ptxas" if which == "13.0" else newer_ptxas()
    source = ptx(home, tmp_path, "sm_121")
    with refused("process.failed", r"not supported on \.target 'sm_121'") as caught:
        run([ptxas, "-arch", "sm_121", source, "-o", tmp_path / "x.cubin"])
    assert wording in caught.value.why
    assert wording in PAGE.read_text(encoding="utf-8")
    error = explained(caught.value)
    assert "without the a suffix" in error.why
    assert "arch=compute_121a,code=sm_121a" in error.fix


@pytest.mark.parametrize("suffix", ["a", "f"])
def test_with_a_suffix_both_assemblers_take_it(home, tmp_path, suffix):
    source = ptx(home, tmp_path, f"sm_121{suffix}")
    for ptxas in (home / "bin/ptxas", newer_ptxas()):
        path = tmp_path / "x.cubin"
        run([ptxas, "-arch", f"sm_121{suffix}", source, "-o", path])
        listing = run([toolchain.program("nvdisasm"), "-c", path]).stdout
        assert listing.count("F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C") == 1
