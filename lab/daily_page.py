"""Writes the measured times of docs/performance.md: `python -m lab.daily_page`.

The figures are those of `ENGINE_FIGURES=bench/results/daily.json tests/engine/run` (tests/engine/conftest.py).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkforge.core.files import read_json, write_atomic
from sparkforge.core.paths import ROOT

FIGURES = ROOT / "bench" / "results" / "daily.json"
PAGE = ROOT / "docs" / "performance.md"
RUNS = 3
NAMES = ("docker run to the first token", "power-on to the first token", "rollback to the first answers")
BEGIN, END = "<!-- made by .venv/bin/python -m lab.daily_page -->", "<!-- end of what it made -->"


def table(document: Mapping[str, Any]) -> str:
    """Return the times as a table in Markdown, with the machine that they were measured on.

    Raises ValueError unless each of NAMES was measured RUNS times; a partial or failed run of the tests has fewer.
    """
    counts = {name: len(runs) for name, runs in document["seconds_to"].items()}
    if counts != dict.fromkeys(NAMES, RUNS):
        measured = ", ".join(f"{name}: {count}" for name, count in counts.items()) or "nothing"
        raise ValueError(f"{FIGURES.name} needs {RUNS} runs of each of {', '.join(NAMES)}; it has {measured}")
    rows = ["| Figure | Median | From … to | Runs | Load at the start |", "| --- | --- | --- | --- | --- |"]
    for name, runs in document["seconds_to"].items():
        seconds, loads = [run["seconds"] for run in runs], [run["load"] for run in runs]
        span = f"{min(seconds):.0f} … {max(seconds):.0f} s"
        load = f"{min(loads):.1f} … {max(loads):.1f}"
        rows.append(f"| `{name}` | {statistics.median(seconds):.0f} s | {span} | {len(runs)} | {load} |")
    machine = document["machine"]
    gib = machine["memory_bytes"] / 2**30
    where = f"{machine['processor']}, {machine['cores']} cores, {gib:.0f} GiB, {machine['system']}"
    date = machine["measured_at"].partition("T")[0]
    return "\n".join([*rows, "", f"{where}; commit {machine['commit']}, {date} (`bench/results/{FIGURES.name}`)."])


def replaced(text: str, figures: Path = FIGURES) -> str:
    """Return the page with the table between its markers. Raises ValueError if markers or figures are missing."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} lacks the markers {BEGIN} and {END}")
    times = table(read_json(figures)) if figures.is_file() else "These times were not measured on a quiet machine yet."
    return f"{before}{BEGIN}\n\n{times}\n\n{END}{after}"


if __name__ == "__main__":
    try:
        write_atomic(PAGE, replaced(PAGE.read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(f"✗ {error}\n  next: sudo env ENGINE_FIGURES={FIGURES} tests/engine/run -k figures")
