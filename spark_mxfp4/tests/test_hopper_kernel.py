"""The CUDA kernel for Hopper, compiled here: matrix instructions that run ahead, no spills. It runs in device/."""

import re
import subprocess

from spark_mxfp4.kernels import hopper, precompile

# ptxas: C7512 and C7520 say that it made the matrix instructions wait for each other.
WAITING = re.compile(r"\(C75(?:12|20)\)")


def test_every_shape_compiles_without_spills_and_without_waiting(tmp_path, nvcc):
    for unit in sorted((precompile.FOLDER / "hopper_units").glob("*.cu")):
        command = [
            nvcc,
            *precompile.flags(hopper.TARGET),
            "-Xptxas",
            "-v",
            "-cubin",
            "-o",
            tmp_path / "unit.cubin",
            unit,
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        kernels = result.stderr.count("Compiling entry function")
        assert kernels == (3 if unit.stem == "layer" else 2), unit
        assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == kernels, result.stderr
        assert not WAITING.search(result.stderr), result.stderr
