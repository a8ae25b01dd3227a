"""One configuration: load, figures, verdict. A failed load is a result too; it says why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkforge.bench import load_checks, samples
from sparkforge.bench.baselines import Baselines, compare_with_competition, compute_ratios
from sparkforge.bench.context import describe_server
from sparkforge.bench.load import LoadClient, OwnClient
from sparkforge.bench.machine import facts
from sparkforge.bench.samples import FinishedLoad
from sparkforge.bench.schema import Client, Config, Gate, Result, ResultCheck
from sparkforge.bench.vllm_client import VllmClient
from sparkforge.core import sse
from sparkforge.core.errors import InputError, SparkforgeError, UsageError
from sparkforge.core.openai import Endpoint
from sparkforge.models import local

CHOICES = ("auto", "vllm", "own")
LIMIT_SECONDS = 7200.0  # 1k/8k at concurrency 16 with 160 prompts at 220 tok/s takes 6,000 s


def choose_client(choice: str, python: Path | None, tokenizer: str, seconds: float) -> LoadClient:
    """Choose the client: vLLM's where its environment and a tokenizer are known, else ours. Raises UsageError.

    A tokenizer that is a repository is taken from the caches of this machine where it is in one. vLLM knows fewer of
    them, and would ask the hub.
    """
    if choice not in CHOICES:
        raise UsageError(f"there is no client {choice!r}", f"there are {', '.join(CHOICES)}", "--client own")
    if choice != "own" and python and python.exists() and tokenizer:
        if local.REPOSITORY.fullmatch(tokenizer):
            with suppress(InputError):
                tokenizer = str(local.find(tokenizer, os.environ))
        return VllmClient(python, tokenizer, seconds)
    if choice == "vllm":
        why = "it needs an environment with vLLM and a tokenizer's folder"
        raise UsageError("vllm bench serve cannot run here", why, "./inv up, or give --tokenizer DIR, or --client own")
    if not sse.available():
        why = "it needs httpx-sse, which the images do not hold"
        raise UsageError("our own load client cannot run here", why, "--client vllm --tokenizer DIR")
    return OwnClient(seconds)


@dataclass(frozen=True)
class Bench:
    """Everything that stays the same over the configurations of one command."""

    endpoint: Endpoint
    load_client: LoadClient
    baselines: Baselines
    gate: Gate
    text: str
    client: Client

    def measure(self, config: Config, progress: Callable[[str], None]) -> Result:
        """Run one configuration and return its result, whatever happens to the server."""
        start, completed = time.monotonic(), 0

        def advance(count: int) -> None:
            """Count requests that ended, well or not."""
            nonlocal completed
            completed += count
            progress(f"{completed} of {config.num_prompts}")

        finished: FinishedLoad | None = None
        try:
            finished = self.load_client.run(self.endpoint, config, self.text, advance)
            checks = load_checks.check_load(finished, config)
        except SparkforgeError as error:
            checks = [ResultCheck(name="the load ran to its end", ok=False, told=f"{error.what}: {error.why}")]
        figures = samples.compute_metrics(finished, config) if finished else None
        valid = figures if all(check.ok for check in checks) else None
        competition = compare_with_competition(valid, self.baselines.competition_figure(*config.key)) if valid else {}
        return Result(
            passed=valid is not None and self.gate.passed,
            config=config,
            gate=self.gate,
            checks=checks,
            metrics=figures,
            ratios=compute_ratios(valid, config.key, self.baselines.figures) if valid else [],
            **competition,
            requests=[sample.row() for sample in finished.samples if not sample.error] if finished else [],
            client=self.client,
            server=describe_server(self.endpoint),
            machine=facts(),
            seconds=round(time.monotonic() - start, 3),
        )
