"""The kernels compiled for GPUs that are not here: ptxas takes them, and hardly a register is spilled."""

import os
import re
import subprocess

import pytest
import triton

from sparkforge.core.paths import ROOT

SOURCES = ROOT / "spark_mxfp4" / "max"
PTXAS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas-blackwell")  # noqa: PTH118, PTH120
SPILLED = 24  # bytes at most; in the branch for 33 to 64 tokens
PRODUCTS = 4  # decode and prefill, with and without the activation


@pytest.mark.parametrize(("accelerator", "target"), [("sm_90a", "sm_90a"), ("sm_121", "sm_121a")])
def test_ptxas_takes_the_kernels(mojo, tmp_path, accelerator, target):
    command = [mojo, "build", "--emit", "asm", "--target-accelerator", accelerator, "-I", SOURCES]
    command += [SOURCES / "trial" / "trial.mojo", "-o", tmp_path / "trial.s"]
    environment = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    products = [*tmp_path.glob("*_decode_kernel*.ptx"), *tmp_path.glob("*_prefill_kernel*.ptx")]
    assert len(products) == PRODUCTS
    for kernel in products:
        for instruction in ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "cp.async.cg.shared.global"):
            assert instruction in kernel.read_text()
    (rounding,) = tmp_path.glob("*_add_and_round*.ptx")
    for kernel in (*products, rounding):
        assert f".target {target}" in kernel.read_text()
        assembled = subprocess.run(
            [PTXAS, f"-arch={target}", "-v", kernel, "-o", tmp_path / "kernel.cubin"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert assembled.returncode == 0, assembled.stderr
        (spilled,) = re.findall(r"(\d+) bytes spill stores", assembled.stderr)
        assert int(spilled) <= SPILLED, assembled.stderr
