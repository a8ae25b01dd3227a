"""Kernels compiled for absent GPUs: ptxas accepts them and spills few registers."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import triton

from project import PACKAGE

SOURCES = PACKAGE / "max"
PTXAS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas-blackwell")  # noqa: PTH118, PTH120
SPILLED = 24  # bytes at most; in the branch for 33 to 64 tokens
COPY = "cp.async.cg.shared.global"
MMA = ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", COPY)
# A fence must make copied data visible to wgmma, which reads through the asynchronous proxy.
WGMMA = ("wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16", COPY, "fence.proxy.async.shared::cta")
# Each with and without the activation. The trial also has the decode kernel without its path for few tokens on sm_90a.
KERNELS = {
    "sm_90a": {"decode_decode_kernel": (4, MMA), "prefill_mma_kernel": (2, MMA), "wgmma_wgmma_kernel": (2, WGMMA)},
    "sm_121a": {"decode_decode_kernel": (2, MMA), "prefill_mma_kernel": (2, MMA)},
}


@pytest.mark.parametrize(("accelerator", "target"), [("sm_90a", "sm_90a"), ("sm_121", "sm_121a")])
def test_ptxas_takes_the_kernels(mojo, tmp_path, accelerator, target):
    command = [mojo, "build", "--emit", "asm", "--target-accelerator", accelerator, "-I", SOURCES]
    command += [Path(__file__).with_name("trial.mojo"), "-o", tmp_path / "trial.s"]
    environment = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (rounding,) = tmp_path.glob("*_add_and_round*.ptx")
    kernels = [rounding]
    for name, (count, instructions) in KERNELS[target].items():
        found = [*tmp_path.glob(f"*_{name}*.ptx")]
        assert len(found) == count, name
        for kernel in found:
            assert [i for i in instructions if i not in kernel.read_text()] == []
        kernels += found
    for kernel in kernels:
        assert f".target {target}" in kernel.read_text()
        assembled = subprocess.run(
            [PTXAS, f"-arch={target}", "-v", kernel, "-o", tmp_path / "kernel.cubin"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert assembled.returncode == 0, assembled.stderr
        assert "warning" not in assembled.stderr, assembled.stderr  # such as wgmma that ptxas makes wait for each other
        (spilled,) = re.findall(r"(\d+) bytes spill stores", assembled.stderr)
        assert int(spilled) <= SPILLED, assembled.stderr
