"""The router's kernels, compiled here for the GPUs that they are made for: no spills. They run in device/."""

import subprocess

import pytest

from spark_mxfp4.kernels import precompile, router


@pytest.mark.parametrize("target", ["90a", "121a"])
def test_every_variant_compiles_without_spills(target, tmp_path, nvcc):
    source, output = precompile.FOLDER / "router.cu", tmp_path / "router.cubin"
    command = [nvcc, *precompile.flags(target), "-Xptxas", "-v", "-cubin", "-o", output, source]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kernels = result.stderr.count("Compiling entry function")
    assert kernels == 2 * (len(router.CLUSTERS) + len(router.TICKETS))  # up to eight tokens, and more
    assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == kernels, result.stderr
