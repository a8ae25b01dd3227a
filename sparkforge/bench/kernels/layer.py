"""`./inv bench.kernels`, `bench.linear`, `bench.shards`: the library's measurements of our kernels, and the machine.

The measurement runs in a process of its own, because a GPU machine's torch is often another than this environment's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from sparkforge.bench.machine import facts
from sparkforge.core.console import say
from sparkforge.core.documents import read_json
from sparkforge.core.errors import ProcessError
from sparkforge.core.files import write_json
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run

FIX = "run it on a machine with an NVIDIA GPU, and name an interpreter that has torch and triton: --python PATH"
SHARDS_FIX = (
    "run it on a machine with two NVIDIA GPUs, and name an interpreter that has torch and triton: --python PATH"
)

FORMATS_FIX = "name an interpreter that has torch: --python PATH"
NEEDS = {"measure_formats": ("torch", FORMATS_FIX), "measure_shards": ("torch, triton", SHARDS_FIX)}


def main(
    output: str,
    python: str,
    tokens: str,
    *,
    module: str = "measure",
    peer: str = "",
    peer_cutlass: bool = False,
    shapes: str = "",
) -> None:
    """Measure with interpreter `python` (default ours) and save `output`; `peer` is a folder with triton_kernels.

    `peer_cutlass` times FlashInfer's CUTLASS kernel too, which the interpreter must have.

    `module` is one of spark_mxfp4.kernels: `measure` for the experts, `measure_shards` for them on two GPUs,
    `measure_linear` for dense products, `measure_formats` for the accuracy of their formats, which needs no GPU;
    `shapes` are some of the latter's matrices.

    Raises ProcessError where there is no GPU, torch or triton.
    """
    interpreter = python or sys.executable
    needed, fix = NEEDS.get(module, ("torch, triton", FIX))
    probe = run([interpreter, "-c", f"import {needed}"], cwd=ROOT, fix=fix, check=False)
    if probe.returncode:
        why = (probe.stderr.strip().splitlines() or [f"it ended with code {probe.returncode}"])[-1]
        raise ProcessError(f"{interpreter} cannot measure kernels", why, fix, code="process.failed")
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command: list[str | Path] = [interpreter, "-m", f"spark_mxfp4.kernels.{module}", "--output", figures]
        for option, value in (("--peer", peer), ("--tokens", tokens), ("--shapes", shapes)):
            command += [option, value] if value else []
        command += ["--peer-cutlass"] if peer_cutlass else []
        say(run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, fix=fix).stdout.rstrip())
        result = {"machine": facts(), **read_json(figures)}
    write_json(ROOT / output, result)
    say(f"saved {output}")
