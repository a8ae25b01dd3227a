"""All attacks for some minutes, with counts as JSON: the program of `./inv test --robustness [--minutes N]`.

If the campaign lasts HOSTILE_MINUTES, hostile requests against a live server run first and alone. Half of the other
time goes to faults and kills, a tenth to races, the rest to malformed input. Scenarios and parsers run in parallel in
separate processes, one for each core; each gets a share of the time, and prints its counts and failures.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from robustness.parsers import PARSERS
from robustness.races import RACED
from robustness.scenarios import SCENARIOS

FAULTS, RACES = 0.5, 0.1  # shares of the time
HOSTILE_MINUTES = 30.0  # a campaign of at least this length also attacks a server
HOSTILE_SECONDS = 600.0  # for its attacks one after another
SHORTEST = 5.0  # seconds for one scenario or parser, at least
START = 3.0  # seconds that a process takes before its first run
BROKEN = ("tracebacks", "hangs", "unhealed", "lost", "litter", "false_refusals", "unsound")


def run(module, name, seconds, seed, folder):
    """Run one attack; return its counts. If it does not run, that counts as a traceback."""
    output = folder / f"{module}-{name}.json"
    arguments = [sys.executable, "-m", f"robustness.{module}", name, "--seconds", f"{seconds:.0f}"]
    arguments += ["--json", str(output), *(() if module == "races" else ("--seed", str(seed)))]
    result = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
    sys.stderr.write(f"{module:6} {result.stdout.strip()}\n{result.stderr}")
    if not output.exists():
        return {"scenario": name, "tracebacks": 1, "failures": [f"it did not run: {' '.join(arguments)}"]}
    value = json.loads(output.read_text())
    return value[0] if isinstance(value, list) else value


def campaign(minutes, seed, workers):
    begun, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="sparkforge-campaign-") as scratch, ThreadPoolExecutor(workers) as pool:

        def run_job(module, name, seconds):
            return module, run(module, name, max(SHORTEST, seconds - START), seed, Path(scratch))

        if minutes >= HOSTILE_MINUTES:
            rows.append(run_job("hostile", "server", HOSTILE_SECONDS))
        room = max(0.0, minutes * 60 - (time.monotonic() - begun)) * workers
        jobs = [("faults", name, room * FAULTS * share) for name, share in _shares(SCENARIOS)]
        jobs += [("races", name, room * RACES / len(RACED)) for name in RACED]
        jobs += [("fuzz", name, room * (1 - FAULTS - RACES) * share) for name, share in _shares(PARSERS)]
        rows += pool.map(run_job, *zip(*jobs, strict=True))
    wanted = ("faults", "kills", "runs", "inputs", *BROKEN)
    return {
        "schema": 1, "seed": seed, "seconds": round(time.monotonic() - begun),
        "totals": {name: sum(row.get(name, 0) for _, row in rows) for name in wanted},
        **{module: [row for of, row in rows if of == module] for module in ("hostile", "faults", "races", "fuzz")},
    }  # fmt: skip


def _shares(costly):
    """Return the share of the time for each name, the longest first, in proportion to the root of its `cost`."""
    roots = {name: value.cost**0.5 for name, value in costly.items()}
    return sorted(((name, root / sum(roots.values())) for name, root in roots.items()), key=lambda pair: -pair[1])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    document = campaign(options.minutes, options.seed, options.workers)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(", ".join(f"{value:,} {name}" for name, value in document["totals"].items()) + "\n")
    return 1 if any(document["totals"][name] for name in BROKEN) else 0


if __name__ == "__main__":
    sys.exit(main())
