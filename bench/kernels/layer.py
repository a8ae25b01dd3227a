"""`./inv bench.kernels`: one layer's experts on this GPU, by the library's own measurement, with the machine's facts.

The measurement runs in a process of its own, because a GPU machine's torch is often another than this environment's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bench.machine import facts
from sparkforge.console import say
from sparkforge.files import write_json
from sparkforge.paths import ROOT
from sparkforge.process import run

FIX = "run it on a machine with an NVIDIA GPU, and name an interpreter that has torch and triton: --python PATH"


def main(output: str, python: str, peer: str, tokens: str) -> None:
    """Measure with interpreter `python` (default ours) and save `output`; `peer` is a folder with triton_kernels.

    Raises CommandError where there is no GPU, torch or triton.
    """
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        words: list[str | Path] = [python or sys.executable, "-m", "spark_mxfp4.kernels.measure", "--output", figures]
        for flag, value in (("--peer", peer), ("--tokens", tokens)):
            words += [flag, value] if value else []
        done = run(words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, fix=FIX)
        say(done.stdout.rstrip())
        result = {"machine": facts(), **json.loads(figures.read_text(encoding="utf-8"))}
    write_json(ROOT / output, result)
    say(f"saved {output}")
