"""Tasks of EleutherAI's lm-eval as further checks of the gate. It is a program of its own, installed by who wants it.

Not verified here: no machine of ours had lm-eval and its data sets together with gpt-oss. What is tested is the command
that is built and how its result file is read (documented form: `results_*.json`, `results` → task → `metric,filter`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.baselines import Baselines
from bench.endpoint import Endpoint
from bench.gate import bounded
from bench.schema import Check
from sparkforge.errors import CommandError, GateUndecidedError, UsageError
from sparkforge.process import run as run_program

PROGRAM = "lm_eval"
INSTALL = "pip install 'lm-eval[api]' in an environment whose bin is on PATH"
SHOTS = {"gsm8k": 3}  # the competition's --num_fewshot
METRIC = {"gsm8k": "exact_match,strict-match"}
CONCURRENT = 16


def checks(endpoint: Endpoint, baselines: Baselines, tasks: list[str]) -> tuple[Check, ...]:
    """Run each task and hold its score against its threshold. Raises UsageError, GateUndecidedError."""
    return tuple(_task(endpoint, baselines, task) for task in tasks)


def command(endpoint: Endpoint, task: str, tokenizer: str, folder: Path) -> list[str]:
    """Return the command for one task; its result goes below `folder`."""
    settings: dict[str, Any] = {
        "model": endpoint.model,
        "base_url": f"{endpoint.url}/v1/completions",
        "num_concurrent": CONCURRENT,
        "max_retries": 1,
        "tokenized_requests": False,
    }
    if tokenizer:
        settings["tokenizer"] = tokenizer
    arguments = ",".join(f"{name}={value}" for name, value in settings.items())
    words = [PROGRAM, "--model", "local-completions", "--model_args", arguments, "--tasks", task]
    shots = ["--num_fewshot", str(SHOTS[task])] if task in SHOTS else []
    return [*words, *shots, "--output_path", str(folder)]


def score(folder: Path, task: str) -> float:
    """Return a task's score from the result file below `folder`. Raises CommandError if there is none."""
    fix = f"run it by hand: {PROGRAM} --tasks {task}"
    try:
        found = max(folder.rglob("results_*.json"))
        return float(json.loads(found.read_text(encoding="utf-8"))["results"][task][METRIC[task]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"lm-eval left no score of {task}", repr(error), fix) from error


def _task(endpoint: Endpoint, baselines: Baselines, task: str) -> Check:
    if task not in METRIC:
        raise UsageError(f"lm-eval's task {task} is not known here", f"known: {', '.join(METRIC)}", "--lm-eval gsm8k")
    threshold = baselines.task_threshold(endpoint.model, task)
    if threshold is None:
        why = "a score without one says nothing"
        fix = "add a row with `task` to bench/baselines.toml, or leave --lm-eval out"
        raise GateUndecidedError(f"no threshold of {task} is known for {endpoint.model}", why, fix)
    if shutil.which(PROGRAM) is None:
        raise UsageError("lm-eval is not installed", f"there is no {PROGRAM} on PATH", INSTALL)
    with tempfile.TemporaryDirectory(prefix="sparkforge-lm-eval-") as name:
        run_program(command(endpoint, task, "", Path(name)), fix="./inv bench.acc without --lm-eval")
        return bounded(task, score(Path(name), task), threshold.at_least[task], upper=False)
