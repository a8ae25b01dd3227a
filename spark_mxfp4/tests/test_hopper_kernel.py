"""The CUDA kernels of the experts, compiled here: matrix instructions that run ahead, no spills, asynchronous copies.

They run in device/.
"""

import re
import subprocess

import pytest

from spark_mxfp4.kernels import hopper, precompile
from spark_mxfp4.kernels.offline import NVDISASM

# ptxas: C7512 and C7520 say that it made the matrix instructions wait for each other.
WAITING = re.compile(r"\(C75(?:12|20)\)")


def compile_unit(nvcc, unit, target, output):
    """Compile a unit to `output` and return what ptxas says, which is that no kernel spills."""
    command = [nvcc, *precompile.flags(target), "-Xptxas", "-v", "-cubin", "-o", output, unit]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kernels = result.stderr.count("Compiling entry function")
    assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == kernels > 0, result.stderr
    return result.stderr


def test_every_shape_compiles_without_spills_and_without_waiting(tmp_path, nvcc):
    for unit in sorted((precompile.FOLDER / "hopper_units").glob("*.cu")):
        said = compile_unit(nvcc, unit, hopper.TARGET, tmp_path / "unit.cubin")
        assert said.count("Compiling entry function") == 2
        assert not WAITING.search(said), said


@pytest.mark.parametrize(("target", "shapes"), [("90a", 9), ("121a", 6)])
def test_a_layer_of_few_tokens_compiles_for_hopper_and_for_the_spark(tmp_path, nvcc, target, shapes):
    cubin = tmp_path / "layer.cubin"
    said = compile_unit(nvcc, precompile.FOLDER / "layer.cu", target, cubin)
    assert said.count("Compiling entry function") == shapes
    code = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout
    kernels = code.split(".section\t.text.")[1:]
    assert len(kernels) == shapes
    for kernel in kernels:
        assert "UBLKCP" in kernel  # bulk copies
        assert "SYNCS" in kernel  # mbarriers
        assert "HMMA.16816.F32.BF16" in kernel
        assert not re.search(r"BPT\.TRAP|\b(LDL|STL|HGMMA|USETMAXREG|UCGABAR)", kernel)
