"""`python -m lab.load_format`: how long a checkpoint takes to load, by vLLM's stock reader and by fastsafetensors.

A checkpoint of random bytes is made for it. A process reads every tensor into a parameter that exists already, as
vLLM's loaders do: cold (the kernel has dropped the files from its page cache), then warm; interpreter, imports and
CUDA's start are not counted. The formats take turns, a process each in every round. All must load the same bytes.
Without a GPU this says what the readers do on this machine's disk and memory; what `--load-format` saves on a GPU takes
an interpreter with torch for CUDA (`--python`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from lab import load_format_child
from sparkforge import environments, pins
from sparkforge.bench.context import facts
from sparkforge.core import paths
from sparkforge.core.console import Steps, console, say
from sparkforge.core.errors import BenchmarkError, UsageError
from sparkforge.core.files import require_space, require_writable, write_json
from sparkforge.core.process import run
from sparkforge.core.program import exit_code

ENVIRONMENT = environments.Environment("loaders")
ROUNDS = 3
SHARDS = 4
MEGABYTES = 400
FIX = ".venv/bin/python -m lab.load_format --python PYTHON, an interpreter with torch, safetensors and fastsafetensors"


def main(output: str, python: str = "", megabytes: int = MEGABYTES) -> None:
    """Measure, print a table and save it with the machine's facts. Raises UsageError and BenchmarkError."""
    if not 8 <= megabytes <= 100_000:
        raise UsageError(f"--size {megabytes} has no meaning here", "it takes 8 to 100000 MB", "--size 400")
    file = require_writable(paths.typed(output))
    steps = Steps(3)
    with steps.step("environment", python or "from locks/loaders.txt"):
        if not python:
            environments.ensure(ENVIRONMENT, pins.load())
    interpreter = Path(python) if python else ENVIRONMENT.python
    paths.state().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=paths.state(), prefix="load-format-") as folder:
        with steps.step("checkpoint", f"{megabytes} MB in {SHARDS} files"):
            require_space(Path(folder), 2 * megabytes * 10**6, "a checkpoint to load")
            _child(interpreter, "make", folder, str(SHARDS), str(megabytes))
        with steps.step("loading", f"{ROUNDS} rounds") as tell:
            result = _measure(interpreter, Path(folder), tell)
    _print_result(result)
    write_json(file, result)
    say(f"saved {file}")


def _measure(interpreter: Path, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    about = _child(interpreter, "about")
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(1, ROUNDS + 1):
        tell(f"round {number} of {ROUNDS}")
        for name in about["formats"]:
            for cache, loaded in _child(interpreter, "load", str(folder), name).items():
                measured.setdefault((name, cache), []).append(loaded)
    first = next(iter(measured.values()))[0]
    if any(loaded["sha256"] != first["sha256"] for rows in measured.values() for loaded in rows):
        raise BenchmarkError(
            "the formats load different bytes",
            "their sha256 differ",
            ".venv/bin/python -m lab.load_format again",
            code="benchmark.load",
        )
    rows = []
    for (name, cache), loads in measured.items():
        seconds = [round(loaded["seconds"], 4) for loaded in loads]
        median = statistics.median(seconds)
        rows.append({
            "format": name,
            "cache": cache,
            "seconds": seconds,
            "median_seconds": round(median, 4),
            "gb_per_second": round(first["bytes"] / median / 1e9, 3),
            "peak_rss_bytes": max(loaded["peak_rss_bytes"] for loaded in loads),
        })  # fmt: skip
    checkpoint = {"bytes": first["bytes"], "tensors": first["tensors"], "files": SHARDS}
    return {"machine": facts(), "checkpoint": checkpoint, **about, "rounds": ROUNDS, "rows": rows}


def _child(interpreter: Path, *arguments: str) -> dict[str, Any]:
    """Run `load_format_child` and return the JSON of its last line. Raises ProcessError, BenchmarkError."""
    command: list[str | Path] = [interpreter, "-P", load_format_child.__file__, *arguments]
    output = run(command, cwd=paths.state(), env={"PYTHONPATH": ""}, fix=FIX).stdout
    try:
        value: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise BenchmarkError("the measuring process said nothing", output[-300:], FIX, code="benchmark.load") from error
    return value


def _print_result(result: dict[str, Any]) -> None:
    table = Table("format", "page cache", "s (median)", "GB/s", "peak RSS GB", title=f"loading on {result['device']}")
    for row in result["rows"]:
        figures = (row["median_seconds"], row["gb_per_second"], row["peak_rss_bytes"] / 1e9)
        table.add_row(row["format"], row["cache"], *(f"{figure:.2f}" for figure in figures))
    console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.load_format", description=__doc__)
    parser.add_argument("--python", default="", help="interpreter with torch, safetensors and fastsafetensors")
    parser.add_argument("--size", type=int, default=MEGABYTES, help="MB of the checkpoint; default: %(default)s")
    parser.add_argument("--output", default="bench/results/load-format.json", help="JSON file for the figures")
    options = parser.parse_args()
    sys.exit(exit_code(lambda: main(options.output, options.python, options.size)))
