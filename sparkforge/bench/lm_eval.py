"""Tasks of EleutherAI's lm-eval as further checks of the gate. It is a separate program that the user installs.

Not verified here: no machine of ours had lm-eval and its data sets together with gpt-oss. What is tested is the command
that is built and how its result file is read (documented form: `results_*.json`, `results` → task → `metric,filter`).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from sparkforge.bench.baselines import Baselines
from sparkforge.bench.gate import bounded
from sparkforge.bench.schema import ResultCheck
from sparkforge.core.documents import read_json
from sparkforge.core.errors import BenchmarkError, ProcessError, UsageError
from sparkforge.core.openai import Endpoint
from sparkforge.core.process import run as run_program

PROGRAM = "lm_eval"
INSTALL = "pip install 'lm-eval[api]' in an environment whose bin is on PATH"
SHOTS = {"gsm8k": 3}  # the competition's --num_fewshot
METRIC = {"gsm8k": "exact_match,strict-match"}
CONCURRENT = 16


def checks(endpoint: Endpoint, baselines: Baselines, tasks: list[str]) -> tuple[ResultCheck, ...]:
    """Run each task and hold its score against its threshold. Raises UsageError, BenchmarkError."""
    return tuple(_run_task(endpoint, baselines, task) for task in tasks)


def command(endpoint: Endpoint, task: str, folder: Path) -> list[str]:
    """Return the command for one task; its result goes below `folder`."""
    settings: dict[str, Any] = {
        "model": endpoint.model,
        "base_url": f"{endpoint.url}/v1/completions",
        "num_concurrent": CONCURRENT,
        "max_retries": 1,
        "tokenized_requests": False,
    }
    arguments = ",".join(f"{name}={value}" for name, value in settings.items())
    shots = ["--num_fewshot", str(SHOTS[task])] if task in SHOTS else []
    options = ["--model", "local-completions", "--model_args", arguments, "--tasks", task, *shots]
    return [PROGRAM, *options, "--output_path", str(folder)]


def score(folder: Path, task: str) -> float:
    """Return a task's score from the result file below `folder`. Raises ProcessError if there is none."""
    fix = f"run it by hand: {PROGRAM} --tasks {task}"
    try:
        newest = max(folder.rglob("results_*.json"))
        return float(read_json(newest, finite=False)["results"][task][METRIC[task]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProcessError(f"lm-eval left no score of {task}", repr(error), fix, code="process.failed") from error


def _run_task(endpoint: Endpoint, baselines: Baselines, task: str) -> ResultCheck:
    if task not in METRIC:
        raise UsageError(f"lm-eval's task {task} is not known here", f"known: {', '.join(METRIC)}", "--lm-eval gsm8k")
    threshold = baselines.task_threshold(endpoint.model, task)
    if threshold is None:
        why = "a score without one says nothing"
        fix = "add a row with `task` to sparkforge/bench/baselines.toml, or leave --lm-eval out"
        raise BenchmarkError(
            f"no threshold of {task} is known for {endpoint.model}", why, fix, code="benchmark.undecided"
        )
    if shutil.which(PROGRAM) is None:
        raise UsageError("lm-eval is not installed", f"there is no {PROGRAM} on PATH", INSTALL)
    with tempfile.TemporaryDirectory(prefix="sparkforge-lm-eval-") as name:
        run_program(command(endpoint, task, Path(name)), fix="./inv bench.acc without --lm-eval")
        return bounded(task, score(Path(name), task), threshold.at_least[task], upper=False)
