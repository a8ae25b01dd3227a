"""All attacks for some minutes, with counts as JSON: the program of `./inv test --robustness [--minutes N]`.

If the campaign lasts HOSTILE_MINUTES, hostile requests against a live server run first and alone. Half of the other
time goes to faults and kills, a tenth to races, the rest to malformed input. Scenarios and parsers run in parallel in
separate processes, one for each core; each gets a share of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from robustness.parsers import PARSERS
from robustness.races import RACED
from robustness.scenarios import SCENARIOS

FAULTS, RACES = 0.5, 0.1  # shares of the time
HOSTILE_MINUTES = 30.0  # a campaign of at least this length also attacks a server
HOSTILE_SECONDS = 600.0  # for its attacks one after another
SHORTEST = 5.0  # seconds for one scenario or parser, at least
START = 3.0  # seconds that a process takes before its first run
COLUMNS = {
    "hostile": ("attacks", "baseline", "worst", "together", "crowded", "busy_cores", "unsound"),
    "faults": ("operations", "faults", "kills", "tracebacks", "hangs", "unhealed", "lost", "litter"),
    "races": ("runs", "succeeded", "refused", "false_refusals", "unsound", "hangs"),
    "fuzz": ("inputs", "accepted", "declared", "named", "tracebacks", "hangs"),
}
BROKEN = ("tracebacks", "hangs", "unhealed", "lost", "litter", "false_refusals", "unsound")


def run(module: str, name: str, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    output = folder / f"{module}-{name}.json"
    arguments = [sys.executable, "-m", f"robustness.{module}", name, "--seconds", f"{seconds:.0f}"]
    arguments += ["--json", str(output), *(() if module == "races" else ("--seed", str(seed)))]
    result = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
    if not output.exists():
        detail = (result.stdout + result.stderr)[-2000:]
        return {"scenario": name, "tracebacks": 1, "failures": [{"broken": "it did not run", "detail": detail,
                                                                 "repeat": " ".join(arguments)}]}  # fmt: skip
    sys.stderr.write(f"{module:6} {result.stdout.strip()}\n{result.stderr}")
    value = json.loads(output.read_text())
    row: dict[str, Any] = value[0] if isinstance(value, list) else value
    return row


def campaign(minutes: float, seed: int, workers: int) -> dict[str, Any]:
    begun, hostile = time.monotonic(), []
    if minutes >= HOSTILE_MINUTES:
        with tempfile.TemporaryDirectory(prefix="sparkforge-campaign-") as scratch:
            hostile = [("hostile", run("hostile", "server", HOSTILE_SECONDS, seed, Path(scratch)))]
    room = max(0.0, minutes * 60 - (time.monotonic() - begun)) * workers
    jobs = [("faults", name, room * FAULTS * share) for name, share in _shares(SCENARIOS)]
    jobs += [("races", name, room * RACES / len(RACED)) for name in RACED]
    jobs += [("fuzz", name, room * (1 - FAULTS - RACES) * share) for name, share in _shares(PARSERS)]
    with tempfile.TemporaryDirectory(prefix="sparkforge-campaign-") as scratch, ThreadPoolExecutor(workers) as pool:

        def run_job(job: tuple[str, str, float]) -> tuple[str, dict[str, Any]]:
            module, name, seconds = job
            return module, run(module, name, max(SHORTEST, seconds - START), seed, Path(scratch))

        rows = [*hostile, *pool.map(run_job, jobs)]
    wanted = ("faults", "kills", "runs", "inputs", *BROKEN)
    return {
        "schema": 1,
        "seed": seed,
        "seconds": round(time.monotonic() - begun),
        "totals": {name: sum(row.get(name, 0) for _, row in rows) for name in wanted},
        **{module: [row for of, row in rows if of == module] for module in COLUMNS},
    }


def _shares(costly: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the share of the time for each name, the longest first, in proportion to the root of its `cost`."""
    roots = {name: value.cost**0.5 for name, value in costly.items()}
    return sorted(((name, root / sum(roots.values())) for name, root in roots.items()), key=lambda pair: -pair[1])


def show(document: dict[str, Any]) -> str:
    lines = []
    for module, columns in COLUMNS.items():
        lines.append(f"{module:22}" + "".join(f"{column:>15}" for column in columns))
        for row in document[module]:
            name = row.get("scenario") or row.get("parser")
            lines.append(f"{name:22}" + "".join(f"{row.get(column, 0):>15,}" for column in columns))
        lines.append("")
    lines += [line for module in COLUMNS for row in document[module] for line in _failures(row.get("failures", []))]
    lines.append(", ".join(f"{value:,} {name}" for name, value in document["totals"].items()))
    return "\n".join(lines)


def _failures(failures: Sequence[Any]) -> list[str]:
    kinds = {}
    for failure in failures:
        if isinstance(failure, str):
            kinds[failure.partition("\n")[0]] = failure.partition("\n")[0]
            continue
        kind = (failure.get("broken", ""), failure.get("where") or failure.get("operation", "").partition(" ")[0])
        kinds[kind] = f"✗ {failure['broken']} {kind[1]}\n    {failure['repeat']}"
    return list(kinds.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    document = campaign(options.minutes, options.seed, options.workers)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(f"{show(document)}\n{options.output}\n")
    return 1 if any(document["totals"][name] for name in BROKEN) else 0


if __name__ == "__main__":
    sys.exit(main())
