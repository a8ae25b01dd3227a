"""The CUDA kernel for Hopper, compiled here: matrix instructions that run ahead, no spills. It runs in tests/device."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spark_mxfp4.kernels import hopper, precompile

pytestmark = pytest.mark.integration
# ptxas: C7512 and C7520 say that it made the matrix instructions wait for each other.
WAITING = re.compile(r"\(C75(?:12|20)\)")
ALLOWED_TO_WAIT = {3}  # six warpgroups leave it too few registers; it is the fastest at its load all the same


def test_every_shape_compiles_without_spills_and_without_waiting(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        told = "nvcc is not installed: ./inv build.toolchain"
        if os.environ.get("CI"):
            pytest.fail(told)
        pytest.skip(told)
    for unit in sorted((precompile.FOLDER / "hopper_units").glob("*.cu")):
        words = [nvcc, *precompile.flags(hopper.TARGET), "-Xptxas", "-v", "-cubin", "-o", tmp_path / "unit.cubin", unit]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        kernels = done.stderr.count("Compiling entry function")
        assert kernels == 2, unit
        assert done.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == kernels, done.stderr
        number = int(Path(unit).stem.rpartition("_")[2])
        assert bool(WAITING.search(done.stderr)) <= (number in ALLOWED_TO_WAIT), done.stderr
