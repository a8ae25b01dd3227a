"""`./inv bench.startup`: what a user waits for, and what packed experts cost against dequantised ones.

Everything is measured from outside, as a user meets it: a copy of the checkout in a temporary folder, `./inv up` with
empty caches (cold) and again (warm), the validator's own durations, and tokens a second over HTTP in both modes.
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.table import Table

from bench.machine import facts
from sparkforge import paths
from sparkforge.console import console, say
from sparkforge.files import require_writable, write_json
from sparkforge.paths import ROOT
from sparkforge.process import run, session_members

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".sparkforge", ".*_cache", "__pycache__", "*.egg-info")
WARM_RUNS = 3
MODEL = ".sparkforge/models/tiny-gpt-oss"
MODES = ("packed", "dequant")
CONCURRENCIES = (1, 4)
TOKENS, REQUESTS_EACH = 64, 6


@dataclass(frozen=True)
class Trial:
    """A copy of the checkout with caches and state of its own."""

    path: Path
    environment: Mapping[str, str]
    port: int

    def inv(self, *words: str, **extra: str) -> float:
        """Run one `./inv` command and return its wall seconds. Raises CommandError."""
        begun = time.monotonic()
        run(["./inv", *words], cwd=self.path, env={**self.environment, **extra}, fix="see the lines above")
        return time.monotonic() - begun

    def up(self, **extra: str) -> dict[str, float]:
        """Bring the server up; return the wall seconds of every step and of the whole command."""
        total = self.inv("up", "--port", str(self.port), **extra)
        steps: dict[str, float] = self.read("up.json")["seconds"]
        return {**steps, "total": round(total, 3)}

    def read(self, name: str) -> Any:
        """Return a JSON file of the trial's state."""
        return json.loads((self.path / ".sparkforge" / name).read_text(encoding="utf-8"))


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
        made = Trial(path, {**empty, "SPARKFORGE_STATE": str(path / ".sparkforge")}, port)
        try:
            yield made
        finally:
            run(["./inv", "down"], cwd=path, env=made.environment, check=False)


def main(output: str) -> None:
    """Measure everything, print the tables and save them with the machine's facts."""
    place = require_writable(paths.typed(output))
    with trial() as here:
        say("cold: empty .venv, empty caches")
        result: dict[str, Any] = {"machine": facts(), "cold": here.up()}
        say(f"warm: {WARM_RUNS} runs")
        result["warm"] = [_again(here) for _ in range(WARM_RUNS)]
        result["validator"] = _validator(here)
        result["experts"] = {mode: _serve(here, mode) for mode in MODES}
    result["packed_over_dequant"] = {
        str(c): round(
            result["experts"]["packed"]["tokens_per_second"][str(c)]
            / result["experts"]["dequant"]["tokens_per_second"][str(c)],
            3,
        )
        for c in CONCURRENCIES
    }
    _show(result)
    write_json(place, result)
    say(f"saved {place}")


def _again(here: Trial) -> dict[str, float]:
    here.inv("down")
    return here.up()


def _validator(here: Trial) -> dict[str, float]:
    """Wall seconds of the validator as a process: facts alone, and with what only vLLM itself can tell."""
    python = here.path / ".sparkforge" / "envs" / "embedded" / "bin" / "python"
    seconds = {}
    for name, words in (("facts", ("embedded", "--no-deep")), ("deep", ("spark", "--deep", "--model", MODEL))):
        times = []
        for _ in range(WARM_RUNS):
            begun = time.monotonic()
            run(
                [python, "-m", "validate", "--profile", *words],
                cwd=here.path,
                env=here.environment,
                check=False,
            )
            times.append(time.monotonic() - begun)
        seconds[name] = round(statistics.median(times), 3)
    return seconds


def _serve(here: Trial, mode: str) -> dict[str, Any]:
    """Tokens a second and memory of the experts' `mode`, served."""
    here.inv("down")
    here.up(SPARK_MXFP4_MODE=mode)
    server = here.read("server.json")
    with httpx.Client(base_url=f"http://127.0.0.1:{here.port}", timeout=300, trust_env=False) as api:
        _tokens_per_second(api, server["model_id"], 1)  # warm-up: the first requests fill caches
        speed = {str(c): round(_tokens_per_second(api, server["model_id"], c), 1) for c in CONCURRENCIES}
    return {"tokens_per_second": speed, **_memory(server["pid"])}


def _tokens_per_second(api: httpx.Client, model: str, concurrency: int) -> float:
    def ask(number: int) -> int:
        """Tokens that came; each prompt is another, so that no cache answers."""
        body = {
            "model": model,
            "prompt": f"Number {number}",
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = api.post("/v1/completions", json=body)
        reply.raise_for_status()
        return int(reply.json()["usage"]["completion_tokens"])

    begun = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        tokens = sum(pool.map(ask, range(REQUESTS_EACH * concurrency)))
    return tokens / (time.monotonic() - begun)


def _memory(leader: int) -> dict[str, int]:
    """Bytes over all of the server's processes: resident, and proportional (shared pages counted once)."""
    maps = [psutil.Process(pid).memory_full_info() for pid in session_members(leader)]
    return {"rss_bytes": sum(m.rss for m in maps), "pss_bytes": sum(m.pss for m in maps)}


def _show(result: Mapping[str, Any]) -> None:
    steps = Table("step", "cold s", f"warm s (median of {WARM_RUNS})", title="./inv up")
    for step, cold in result["cold"].items():
        steps.add_row(step, f"{cold:.1f}", f"{statistics.median(run[step] for run in result['warm']):.1f}")
    experts = Table("experts", *(f"tok/s c={c}" for c in CONCURRENCIES), "RSS GB", "PSS GB", title="MXFP4 experts")
    for mode, row in result["experts"].items():
        speeds = (str(row["tokens_per_second"][str(c)]) for c in CONCURRENCIES)
        experts.add_row(mode, *speeds, f"{row['rss_bytes'] / 1e9:.2f}", f"{row['pss_bytes'] / 1e9:.2f}")
    console().print(steps, experts)
    say(f"packed over dequant: {result['packed_over_dequant']}; validator seconds: {result['validator']}")
