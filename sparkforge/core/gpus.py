"""What nvidia-smi says about the NVIDIA GPUs. A cluster node without our code is asked by probe.py instead."""

from __future__ import annotations

import csv
from collections.abc import Mapping

from sparkforge.core.bounded import ProbeError, ask, require

SECONDS = 5.0  # nvidia-smi hangs with a broken driver


def query(*fields: str, units: bool = True, env: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return field → text for each GPU. `units`: sizes as "143771 MiB", else as "143771".

    Raises ProbeError if nvidia-smi is absent, fails, hangs or lists no GPU.
    """
    form = "csv,noheader" if units else "csv,noheader,nounits"
    answer = ask(["nvidia-smi", f"--query-gpu={','.join(fields)}", f"--format={form}"], seconds=SECONDS, env=env)
    lines = require(answer, "nvidia-smi", SECONDS).splitlines()
    rows = [row for row in csv.reader(lines, skipinitialspace=True) if len(row) == len(fields)]
    if not rows:
        raise ProbeError("nvidia-smi lists no GPU")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def number(text: str) -> float | None:
    """Return a field's text as a number; None for [N/A] and [Not Supported]."""
    try:
        return float(text)
    except ValueError:
        return None
