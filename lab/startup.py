"""`python -m lab.startup`: what a user waits for, and what packed experts cost against dequantised ones.

Everything is measured from outside, as a user meets it: a copy of the checkout in a temporary folder, `./inv up` with
empty caches (cold) and again (warm), the validator's own durations, and tokens a second over HTTP in both modes.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sparkforge.bench.context import facts, memory
from sparkforge.bench.load import Prompt, require_answers, send
from sparkforge.core import paths
from sparkforge.core.console import console, say
from sparkforge.core.documents import read_json
from sparkforge.core.files import require_writable, write_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.core.process import run, run_unchecked
from sparkforge.core.program import exit_code

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".sparkforge", ".*_cache", "__pycache__", "*.egg-info")
WARM_RUNS = 3
MODEL = ".sparkforge/models/tiny-gpt-oss"
MODES = ("packed", "dequant")
CONCURRENCIES = (1, 4)
TOKENS, REQUESTS_PER_SLOT = 64, 6
READ_SECONDS, LOAD_SECONDS = 300.0, 3600.0


@dataclass(frozen=True)
class Trial:
    """A copy of the checkout with caches and state of its own."""

    path: Path
    environment: Mapping[str, str]
    port: int

    def inv(self, *arguments: str, **extra: str) -> float:
        """Run one `./inv` command and return its wall seconds. Raises ProcessError."""
        start = time.monotonic()
        run(["./inv", *arguments], cwd=self.path, env={**self.environment, **extra}, fix="see the lines above")
        return time.monotonic() - start

    def up(self, **extra: str) -> dict[str, float]:
        """Start the server; return the wall seconds of every step and of the whole command."""
        total = self.inv("up", "--port", str(self.port), **extra)
        steps: dict[str, float] = self.read("up.json")["seconds"]
        return {**steps, "total": round(total, 3)}

    def read(self, name: str) -> Any:
        """Return a JSON file of the trial's state."""
        return read_json(self.path / ".sparkforge" / name)


@contextmanager
def trial() -> Iterator[Trial]:
    """Make a fresh copy with empty caches; end its server and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="sparkforge-bench-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        path, caches = Path(folder) / "checkout", Path(folder) / "caches"
        shutil.copytree(ROOT, path, ignore=LEFT_OUT, symlinks=True)
        empty = {name: str(caches / name) for name in ("SPARKFORGE_CACHE", "UV_CACHE_DIR", "PIP_CACHE_DIR")}
        checkout = Trial(path, {**empty, "SPARKFORGE_STATE": str(path / ".sparkforge")}, port)
        try:
            yield checkout
        finally:
            run_unchecked(["./inv", "down"], cwd=path, env=checkout.environment)


def main(output: str) -> None:
    """Measure everything, print the tables and save them with the machine's facts."""
    file = require_writable(paths.typed(output))
    with trial() as checkout:
        say("cold: empty .venv, empty caches")
        result: dict[str, Any] = {"machine": facts(), "cold": checkout.up()}
        say(f"warm: {WARM_RUNS} runs")
        result["warm"] = []
        for _ in range(WARM_RUNS):
            checkout.inv("down")
            result["warm"].append(checkout.up())
        result["validator"] = _time_validator(checkout)
        result["experts"] = {mode: _serve(checkout, mode) for mode in MODES}
    packed, dequant = (result["experts"][mode]["tokens_per_second"] for mode in ("packed", "dequant"))
    result["packed_over_dequant"] = {c: round(packed[c] / dequant[c], 3) for c in map(str, CONCURRENCIES)}
    _print_result(result)
    write_json(file, result)
    say(f"saved {file}")


def _time_validator(checkout: Trial) -> dict[str, float]:
    """Return wall seconds of the validator as a process: facts alone, and with what only vLLM itself reports."""
    python = checkout.path / ".sparkforge" / "envs" / "embedded" / "bin" / "python"
    seconds = {}
    for name, arguments in (("facts", ("embedded", "--no-deep")), ("deep", ("spark", "--deep", "--model", MODEL))):
        times = []
        for _ in range(WARM_RUNS):
            start = time.monotonic()
            command = [python, "-m", "validate", "--profile", *arguments]
            run_unchecked(command, cwd=checkout.path, env=checkout.environment)
            times.append(time.monotonic() - start)
        seconds[name] = round(statistics.median(times), 3)
    return seconds


def _serve(checkout: Trial, mode: str) -> dict[str, Any]:
    """Return tokens a second and memory of a server with the experts' `mode`."""
    checkout.inv("down")
    checkout.up(SPARK_MXFP4_MODE=mode)
    server = checkout.read("server.json")
    endpoint = Endpoint(f"http://127.0.0.1:{checkout.port}", server["model_id"], READ_SECONDS, key="")
    _tokens_per_second(endpoint, 1)  # warm-up: the first requests fill caches
    speed = {str(concurrency): round(_tokens_per_second(endpoint, concurrency), 1) for concurrency in CONCURRENCIES}
    used = memory(server["pid"])
    return {"tokens_per_second": speed, "rss_bytes": used["rss"], "pss_bytes": used["pss"]}


def _tokens_per_second(endpoint: Endpoint, concurrency: int) -> float:
    # Each prompt differs, so that no cache answers.
    prompts = [Prompt(f"Number {number}", TOKENS) for number in range(REQUESTS_PER_SLOT * concurrency)]
    load = require_answers(send(endpoint, prompts, concurrency, LOAD_SECONDS))
    return sum(sample.output_tokens for sample in load.samples) / load.duration


def _print_result(result: Mapping[str, Any]) -> None:
    steps = Table("step", "cold s", f"warm s (median of {WARM_RUNS})", title="./inv up")
    for step, cold in result["cold"].items():
        steps.add_row(step, f"{cold:.1f}", f"{statistics.median(run[step] for run in result['warm']):.1f}")
    experts = Table("experts", *(f"tok/s c={c}" for c in CONCURRENCIES), "RSS GB", "PSS GB", title="MXFP4 experts")
    for mode, row in result["experts"].items():
        speeds = (str(row["tokens_per_second"][str(c)]) for c in CONCURRENCIES)
        experts.add_row(mode, *speeds, f"{row['rss_bytes'] / 1e9:.2f}", f"{row['pss_bytes'] / 1e9:.2f}")
    console().print(steps, experts)
    say(f"packed over dequant: {result['packed_over_dequant']}; validator seconds: {result['validator']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.startup", description=__doc__)
    parser.add_argument("--output", default="bench/results/startup.json", help="JSON file for the figures")
    options = parser.parse_args()
    sys.exit(exit_code(lambda: main(options.output)))
