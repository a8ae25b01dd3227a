"""The dense kernels, compiled for GPUs without spills, and run on a CPU with threads as fibers.

On GPUs they run in tests/device.
"""

import ctypes
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from spark_mxfp4.kernels import linear, precompile
from spark_mxfp4.kernels.linear import NO_FIT, Format, Weight, reference
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration
ON_CPU = ROOT / "tests" / "unit" / "spark_mxfp4" / "on_cpu"  # what the kernels ask of a GPU
HOPPER, SMALLER = (232_448, 233_472), (101_376, 102_400)  # 9.0, 12.x: shared bytes of a block and a multiprocessor
OLDER = 16  # the variants before linear_strips
TOKENS = {  # of a pass, linear_strips
    8: (*range(16, 21), 35), 16: range(21, 26), 32: range(26, 31), 64: range(31, 35),
}  # fmt: skip
STRIPS = [(variant, tokens) for tokens, numbers in TOKENS.items() for variant in numbers]
CLUSTERS = 4


@pytest.mark.parametrize("target", ["90a", "121a"])
def test_every_variant_compiles_without_spills(target, tmp_path, nvcc):
    source, output = precompile.FOLDER / "linear.cu", tmp_path / "linear.cubin"
    command = [nvcc, *precompile.flags(target), "-Xptxas", "-v", "-cubin", "-o", output, source]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kernels = result.stderr.count("Compiling entry function")
    assert kernels > 3 * (OLDER + len(STRIPS))  # three formats of each variant, and the expansion
    assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == kernels, result.stderr


def test_a_wheel_with_compiled_kernels_is_for_this_platform_and_its_library_loads(tmp_path, nvcc, monkeypatch):
    """The library is whole: it loads without torch and without a GPU, and answers by CUDA's own runtime."""
    source = tmp_path / "spark_mxfp4"
    shutil.copytree(ROOT / "spark_mxfp4", source, ignore=shutil.ignore_patterns("__pycache__", "build", "compiled"))
    monkeypatch.setenv("SPARK_MXFP4_PRECOMPILE", "121a")
    monkeypatch.setenv("CUDA_HOME", str(Path(nvcc).parent.parent))
    command = [sys.executable, "-m", "uv", "build", "--wheel", "--offline", "--no-build-isolation"]
    command += ["--python", sys.executable, "--out-dir", str(tmp_path), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".so"))
        archive.extractall(tmp_path / "installed")
    compiled = "spark_mxfp4/kernels/compiled"
    assert names == [f"{compiled}/{precompile.file_name(library, '121a')}" for library in ("linear", "router")]
    name = names[0]
    library = linear.bind(str(tmp_path / "installed" / name))
    assert library.spark_linear_error(0) == b"no error"
    loaded = Path("/proc/self/maps").read_text()
    assert name in loaded
    assert "libcudart" not in loaded


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """linear.cu as a shared library for this machine's CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ here")
    folder = tmp_path_factory.mktemp("linear")
    for path in (*ON_CPU.iterdir(), precompile.FOLDER / "linear.cu"):
        shutil.copy(path, folder)
    command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-fno-gnu-unique", "-shared", "-fPIC", "linear.cu"]
    subprocess.run([*command, "-o", "linear.so"], cwd=folder, check=True, capture_output=True)
    library = linear.bind(str(folder / "linear.so"))
    assert library.spark_linear_variant_count() == OLDER + len(STRIPS)
    return library


def error_on_cpu(library, choice, format_, rows, columns, tokens, processors=3, device=HOPPER):
    """The relative error of one launch between poisoned rows, NO_FIT, or the threads that never ended."""
    generator = torch.Generator().manual_seed(rows + columns + tokens)
    matrix = torch.randn(rows, columns, generator=generator) * 0.05
    weight, exact = Weight.pack(matrix, format_), reference(matrix, format_).double()
    x = torch.full((tokens + 1, columns + 16), torch.nan).bfloat16()
    x[:tokens, :columns] = torch.randn(tokens, columns, generator=generator)
    bias = torch.randn(rows, generator=generator).bfloat16() if tokens % 2 else None
    out = torch.full((tokens + 1, rows), torch.nan).bfloat16()
    job = linear._job(weight, out[:tokens], x[:tokens, :columns], bias)
    variant, blocks, parts = choice
    library.choose_device(*device, CLUSTERS)
    result = library.spark_linear(ctypes.byref(job), int(format_), variant, processors, blocks, parts, None)
    if result:
        return result
    assert out[tokens:].isnan().all()
    wanted = x[:tokens, :columns].double() @ exact.T + (0 if bias is None else bias.double())
    return float((out[:tokens].double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("variant", "most"), STRIPS)
def test_up_to_64_tokens_in_one_pass_on_a_cpu(on_cpu, variant, most):
    for parts in range(5):
        rows, columns = [(70, 224), (200, 352), (33, 1056), (16, 320)][(variant + parts) % 4]
        tokens = [most, most - 1, most // 2 + 1, max(1, most // 4)][(2 * variant + parts) % 4]
        error = error_on_cpu(on_cpu, (variant, 1, parts), Format((variant + parts) % 3), rows, columns, tokens)
        # Half a multiprocessor has neither the warps for 200 rows nor the memory for all columns of 64 tokens.
        assert 0 <= error < 0.004 or (error == NO_FIT and variant == 33), (parts, rows, columns, tokens)


@pytest.mark.parametrize("format_", [Format.MXFP4, Format.FP8])
@pytest.mark.parametrize(("variant", "rows"), [(29, 500), (30, 700), (32, 300), (34, 500), (22, 500), (16, 500)])
def test_strips_one_after_another_with_x_whole_and_as_a_ring(on_cpu, variant, rows, format_):
    most = dict(STRIPS)[variant]
    for device, tokens in ((HOPPER, most), (SMALLER, most - 1)):
        error = error_on_cpu(on_cpu, (variant, 1, 0), format_, rows, 1184, tokens, processors=1, device=device)
        assert 0 <= error < 0.004 or (error == NO_FIT and device == SMALLER and variant in (22, 34)), device


@pytest.mark.parametrize("variant", range(OLDER))
def test_the_variants_for_fewer_tokens_on_a_cpu(on_cpu, variant):
    for rows, columns, tokens in ((70, 192, 9), (200, 192, 33)):
        format_ = Format((variant + tokens) % 3)
        assert 0 <= error_on_cpu(on_cpu, (variant, 1, 0), format_, rows, columns, tokens, processors=2) < 0.004


def test_more_tokens_than_a_variant_takes_are_refused(on_cpu):
    assert error_on_cpu(on_cpu, (28, 1, 2), Format.MXFP8, 70, 224, 33) == NO_FIT
