"""Compile small units for several targets, without a GPU, and check that the audit recognises them."""

import functools
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.audit import cubins, elf
from sparkforge.audit.cubins import Tools
from sparkforge.audit.report import audit_files
from sparkforge.audit.rules import load
from sparkforge.compile import toolchain
from sparkforge.core.process import run

pytestmark = [pytest.mark.integration, pytest.mark.needs("c++")]
UNITS = Path(__file__).with_name("fp4_units.cu")
BOTH = "-DWITH_GEMM", "-DWITH_CONVERSION"


@pytest.fixture(scope="module")
def home():
    return toolchain.find().home


@pytest.fixture(scope="module")
def tools():
    return Tools(toolchain.program("cuobjdump"), toolchain.program("nvdisasm"))


@pytest.fixture(scope="module")
def compiled(home, tmp_path_factory):
    """Compile each (kind of file, code, flags) once."""

    @functools.cache
    def compile_unit(suffix, code, flags):
        kind = {".cubin": ["-cubin"], ".o": ["-c"], ".so": ["-shared", "-Xcompiler", "-fPIC", "-cudart", "shared"]}
        path = tmp_path_factory.mktemp("unit") / f"unit{suffix}"
        gencode = ["-gencode", f"arch={code[0]},code={code[1]}"]
        arguments = [home / "bin/nvcc", *kind[suffix], *gencode, f"-L{home}/lib64", *flags, UNITS, "-o", path]
        run(arguments, env={"CUDA_HOME": str(home), "TMPDIR": tempfile.gettempdir()})
        return path

    return compile_unit


@pytest.fixture
def build(compiled, tmp_path):
    def copy_unit(name, code, *flags):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(compiled(path.suffix, code, flags), path)
        return path

    return copy_unit


NATIVE, FAMILY, FAMILY_120 = ("compute_121a", "sm_121a"), ("compute_121f", "sm_121f"), ("compute_120f", "sm_120f")
PLAIN, MISLABELLED, HOPPER = ("compute_121", "sm_121"), ("compute_121", "sm_121a"), ("compute_90a", "sm_90a")


def rules_of(report):
    return Counter(violation.rule for violation in report.violations)


@pytest.mark.parametrize("code", [NATIVE, FAMILY, FAMILY_120], ids="-".join)
@pytest.mark.parametrize("name", ["one.cubin", "fp4_one.o", "fp4_one.so"])
def test_hardware_fp4_passes(build, tools, code, name):
    report = audit_files([build(name, code, *BOTH)], tools=lambda: tools)
    report.require_clean()
    (row,) = report.coverage
    assert (row.target, row.loads, row.kernels, row.fp4, row.block_scaled) == (code[1], True, 3, 2, 1)
    assert row.cubins == (2 if name.endswith(".so") else 1)  # nvcc links an empty cubin into a library


def test_software_under_the_right_label(build, tools):
    path = build("one.cubin", MISLABELLED, "-DWITH_CONVERSION")
    report = audit_files([path], tools=lambda: tools)
    assert report.coverage[0].target == "sm_121a"  # the label is right
    assert rules_of(report) == {"software-fp4": 1}
    assert "compute_121 assembled as sm_121a" in report.violations[0].detail


def test_trap_stubs(build, tools):
    report = audit_files([build("one.o", MISLABELLED, "-DWITH_GEMM")], tools=lambda: tools)
    assert rules_of(report) == {"trap-stub": 1, "trap-string": 1}
    assert report.coverage[0].traps == 1


def test_software_conversion_is_found_by_the_units_name(build, tools):
    flags = "-DWITH_CONVERSION", "-Dcvt_fp32_to_fp4=quantise"
    for code, rules in ((MISLABELLED, {"software-fp4": 1}), (NATIVE, {})):
        assert rules_of(audit_files([build("nvfp4_quantise.o", code, *flags)], tools=lambda: tools)) == rules


@pytest.mark.parametrize("name", ["one.cubin", "one.o", "one.so"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_truncated_file(build, tools, name, share):
    path = build(name, NATIVE, *BOTH)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert rules_of(audit_files([path], tools=lambda: tools)) == {"damaged": 1}


@pytest.mark.parametrize("mode", ["none", "size"])
def test_truncated_fatbin_in_a_whole_library(build, tools, mode):
    """The cubin's size exceeds the file; cuobjdump alone would print the rest and exit with 0."""
    path = build("one.so", NATIVE, *BOTH, f"--compress-mode={mode}")
    with elf.opened(path) as opened:
        start = opened.get_section_by_name(".nv_fatbin")["sh_offset"]
    data = bytearray(path.read_bytes())
    at = start + elf.FATBIN_HEADER.size + 8  # the first entry's payload size
    size = int.from_bytes(data[at : at + 8], "little")
    data[at : at + 8] = (size + 4096).to_bytes(8, "little")
    path.write_bytes(data)
    assert rules_of(audit_files([path], tools=lambda: tools)) == {"damaged": 1}


def test_code_that_nvdisasm_cannot_read_is_reported_for_its_file(build, tools):
    good, bad = build("good.cubin", NATIVE, *BOTH), build("bad.cubin", NATIVE, *BOTH)
    data = bytearray(bad.read_bytes())
    at = next(at for name, (at, _) in elf.code(bytes(data)).sections.items() if name.startswith(".text."))
    data[at : at + cubins.WIDTH] = b"\xff" * cubins.WIDTH
    bad.write_bytes(data)
    report = audit_files([good, bad], tools=lambda: tools)
    assert [(found.rule, Path(found.file).name) for found in report.violations] == [("damaged", "bad.cubin")]
    assert [(Path(row.file).name, row.fp4) for row in report.coverage] == [("good.cubin", 2)]


@pytest.mark.parametrize(("mode", "packing"), [("none", elf.ELF), ("size", elf.ZSTD)])
def test_cubins_are_read_as_cuobjdump_unpacks_them(build, tools, mode, packing, monkeypatch):
    extra = "-gencode", "arch=compute_90a,code=sm_90a", "-gencode", "arch=compute_120f,code=sm_120f"
    path = build("one.so", NATIVE, *BOTH, *extra, f"--compress-mode={mode}")
    with elf.opened(path) as opened:
        packings = [binary.packing for binary in elf.entries(opened) if binary.kind == elf.KIND_CUBIN]
    ours = audit_files([path], tools=lambda: replace(tools, cuobjdump=path.parent / "none"))
    monkeypatch.setattr(cubins, "READABLE", ())
    theirs = audit_files([path], tools=lambda: tools)
    assert packings == [packing] * 6  # for each target ours, and the empty cubin that nvcc links into a library
    assert not ours.violations
    assert ours.coverage == theirs.coverage
    assert [row.target for row in ours.coverage] == ["sm_120f", "sm_121a", "sm_90a"]
    assert by_kernel(ours) == by_kernel(theirs)


def by_kernel(report):
    findings = [(cubin.target, cubin.size, cubin.kernels) for binary in report.binaries for cubin in binary.cubins]
    return sorted(findings, key=str)


@pytest.mark.parametrize("code", [NATIVE, FAMILY_120, PLAIN], ids="-".join)
def test_shapes_count_what_nvdisasm_prints(build, tools, code):
    """Compare our counts with nvdisasm's full listing, kernel by kernel, for every mnemonic of a rule."""
    mixed = () if code == PLAIN else ("-DWITH_MIX",)
    path = build("one.cubin", code, *BOTH, *mixed)
    read = elf.code(path.read_bytes())
    kernels, samples = cubins.count(read.kernels())
    decoder = cubins.Decoder(tools.nvdisasm, read.target)
    decoder.learn(samples)
    listing = run([tools.nvdisasm, "-c", path]).stdout
    parts = {part.split(maxsplit=1)[0]: part for part in listing.split("//--------------------- .text.")[1:]}
    watched = re.compile(load().sass.watched)
    assert len(kernels) == len(parts) == 3 + len(mixed)
    for kernel in kernels:
        full = Counter(name for _, name in cubins.LINE.findall(parts[kernel.kernel]))
        ours = cubins.named(kernel, decoder.known)
        assert only(ours, watched) == only(full, watched)
        assert base_names(ours) == base_names(full)
        assert kernel.instructions == full.total()


def only(counts, watched):
    return {name: number for name, number in counts.items() if watched.search(name)}


def base_names(counts):
    return Counter(name.partition(".")[0] for name in Counter(counts).elements())
