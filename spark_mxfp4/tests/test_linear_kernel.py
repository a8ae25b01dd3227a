"""The dense kernels in a wheel, and on a CPU with fibers for threads; tests in device/ run them on GPUs."""

import ctypes
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import cpu_kernels
from project import PROJECT
from spark_mxfp4.kernels import extension, linear, precompile
from spark_mxfp4.kernels.extension import NO_FIT
from spark_mxfp4.kernels.linear import Format, Weight, reference
from spark_mxfp4.mxfp4 import dequantize

pytestmark = pytest.mark.needs("c++")
VARIANTS = 16
HOPPER, SMALLER = 232_448, 101_376  # bytes of shared memory for a block, compute capability 9.0 and 12.x
MOST_CHUNKS = dict(enumerate((45, 45, 64, 32, 64, 128, 45, 64, 32, 64)))  # of linear_columns: chunks a warp times warps
THREE_AT_ONCE = (10, 12)  # variants of linear_rows that take three chunks at once


def test_a_wheel_with_compiled_kernels_is_for_this_platform_and_its_library_loads(tmp_path, nvcc, monkeypatch):
    """The library is complete: it loads without torch or a GPU, and its CUDA runtime answers calls."""
    source = tmp_path / "spark_mxfp4"
    shutil.copytree(PROJECT, source, ignore=shutil.ignore_patterns(".venv", "__pycache__", "build", "compiled"))
    monkeypatch.setenv("SPARK_MXFP4_PRECOMPILE", "121a")
    monkeypatch.setenv("CUDA_HOME", str(Path(nvcc).parent.parent))
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(tmp_path), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".so"))
        archive.extractall(tmp_path / "installed")
    compiled = "spark_mxfp4/kernels/compiled"
    libraries = ("layer", "linear", "router", "step")
    assert names == [f"{compiled}/{precompile.file_name(library, '121a')}" for library in libraries]
    name = names[1]
    library = extension.bind(str(tmp_path / "installed" / name), linear.FUNCTIONS)
    assert library.spark_error(0) == b"no error"
    loaded = Path("/proc/self/maps").read_text()
    assert name in loaded
    assert "libcudart" not in loaded


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("linear")
    library = extension.bind(cpu_kernels.shared_library(folder, "linear.cu"), linear.FUNCTIONS)
    assert library.spark_linear_variant_count() == VARIANTS
    return library


def error_on_cpu(library, variant, format_, rows, columns, tokens, device=HOPPER):
    """Return the relative error of one launch between poisoned rows, NO_FIT, or the number of threads that hang."""
    generator = torch.Generator().manual_seed(rows + columns + tokens)
    matrix = torch.randn(rows, columns, generator=generator) * 0.05
    weight, exact = Weight.pack(matrix, format_), reference(matrix, format_).double()
    x = torch.full((tokens + 1, columns + 16), torch.nan).bfloat16()
    x[:tokens, :columns] = torch.randn(tokens, columns, generator=generator)
    bias = torch.randn(rows, generator=generator).bfloat16() if tokens % 2 else None
    out = torch.full((tokens + 1, rows), torch.nan).bfloat16()
    job = linear._job(weight, out[:tokens], x[:tokens, :columns], bias)
    library.choose_bytes_of_block(device)
    result = library.spark_linear(ctypes.byref(job), int(format_), variant, 2, 1, None)
    if result:
        return result
    assert out[tokens:].isnan().all()
    wanted = x[:tokens, :columns].double() @ exact.T + (0 if bias is None else bias.double())
    return float((out[:tokens].double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize("variant", range(VARIANTS))
def test_every_variant_multiplies_on_a_cpu(on_cpu, variant, format_):
    """Test sizes that are no multiples of a tile, then the most columns for all warps, or several tiles in turn."""
    last = (70, 64 * MOST_CHUNKS[variant], 2) if variant in MOST_CHUNKS else (530, 576, 2)
    for rows, columns, tokens in ((150, 192, 9), (16, 160, 1), (40, 544, 33), (20, 352, 64), last):
        error = error_on_cpu(on_cpu, variant, format_, rows, columns, tokens)
        assert 0 <= error < 0.004, (rows, columns, tokens, error)


@pytest.mark.parametrize("variant", range(VARIANTS))
def test_a_variant_refuses_what_it_cannot_take(on_cpu, variant):
    if variant in MOST_CHUNKS:
        columns = 64 * MOST_CHUNKS[variant]
        assert error_on_cpu(on_cpu, variant, Format.MXFP8, 16, columns + 64, 1) == NO_FIT
        error = error_on_cpu(on_cpu, variant, Format.MXFP8, 16, columns, 1, SMALLER)
        assert 0 <= error < 0.004 if variant in (4, 9) else error == NO_FIT
    else:
        assert (error_on_cpu(on_cpu, variant, Format.MXFP8, 16, 256, 1) == NO_FIT) == (variant in THREE_AT_ONCE)
        assert error_on_cpu(on_cpu, variant, Format.MXFP8, 16, 64 * 45 * 5, 1, SMALLER) == NO_FIT


def expanded(library, weight):
    """Return the matrix bf16 [N, K] that linear.cu reads from `weight`."""
    out = torch.full((weight.rows + 1, weight.columns), torch.nan).bfloat16()
    job = linear._job(weight, out[:-1])
    assert library.spark_linear_expand(ctypes.byref(job), int(weight.format), None) == 0
    assert out[-1].isnan().all()
    return out[:-1]


@pytest.mark.parametrize("format_", Format)
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (17, 96), (48, 32), (5, 2880), (70, 224)])
def test_the_kernel_reads_the_quantised_matrix(on_cpu, format_, rows, columns):
    matrix = torch.randn(rows, columns) * torch.logspace(-6, 0, rows)[:, None]
    matrix[0] = 0
    weight = Weight.pack(matrix, format_)
    assert weight.data.shape == (-(-rows // 16), -(-columns // 64), format_.chunk_bytes)
    assert torch.equal(expanded(on_cpu, weight), reference(matrix, format_).bfloat16())


def test_every_byte_keeps_its_place(on_cpu):
    blocks = torch.randint(0, 256, (32, 6, 16), dtype=torch.uint8)
    scales = torch.randint(100, 129, (32, 6), dtype=torch.uint8)
    values = dequantize(blocks, scales).bfloat16()
    assert torch.equal(expanded(on_cpu, Weight.from_mxfp4(blocks, scales)), values)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(4)[: 16 * 62].view(16, 62)
    elements = torch.nn.functional.pad(codes, (0, 2)).view(torch.float8_e4m3fn)
    assert torch.equal(expanded(on_cpu, Weight.from_fp8(elements, torch.ones(16))), elements.bfloat16())
