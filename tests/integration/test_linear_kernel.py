"""The dense kernels, compiled here for the GPUs that they are made for: no spills. They run in tests/device."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spark_mxfp4.kernels import linear, precompile
from sparkforge.core.paths import ROOT

pytestmark = pytest.mark.integration


@pytest.fixture
def nvcc():
    """CUDA's compiler, from PATH."""
    program = shutil.which("nvcc")
    if program is None:
        why = "nvcc is not installed: ./inv build.toolchain"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return program


@pytest.mark.parametrize("target", ["90a", "121a"])
def test_every_variant_compiles_without_spills(target, tmp_path, nvcc):
    command = [
        nvcc,
        *precompile.flags(target),
        "-Xptxas",
        "-v",
        "-cubin",
        "-o",
        tmp_path / "linear.cubin",
        precompile.FOLDER / "linear.cu",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kernels = result.stderr.count("Compiling entry function")
    assert kernels > 3 * 16  # three formats of sixteen variants, and the expansion
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
        [name] = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "installed")
    assert name == f"spark_mxfp4/kernels/compiled/{precompile.file_name('linear', '121a')}"
    library = linear.bind(str(tmp_path / "installed" / name))
    assert library.spark_linear_error(0) == b"no error"
    loaded = Path("/proc/self/maps").read_text()
    assert name in loaded
    assert "libcudart" not in loaded
