"""One configuration: load, figures, verdict. A failed load is a result too; it says why."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import judge, load, samples, vllm_client
from bench.baselines import Baselines, ratios
from bench.context import server
from bench.endpoint import Endpoint
from bench.machine import facts
from bench.samples import Load
from bench.schema import Check, Client, Config, Gate, Result
from sparkforge.errors import SparkforgeError, UsageError

CHOICES = ("auto", "vllm", "own")
LIMIT_SECONDS = 7200.0  # 1k/8k at concurrency 16 with 160 prompts at 220 tok/s takes 6,000 s


@dataclass(frozen=True)
class Loader:
    """What makes the load: `vllm bench serve` in the environment of `python`, or our own client if that is None."""

    python: Path | None
    tokenizer: str
    limit: float = LIMIT_SECONDS

    def client(self) -> Client:
        """Return what the result says of it."""
        return vllm_client.client(self.python) if self.python else load.client()

    def run(self, endpoint: Endpoint, config: Config, text: str, progress: load.Progress) -> Load:
        """Make the load. Raises LoadFailedError, ServerReplyError."""
        if self.python:
            return vllm_client.run(self.python, self.tokenizer, endpoint, config, self.limit, progress)
        return load.run(endpoint, config, text, self.limit, progress)


def loader(choice: str, python: Path | None, tokenizer: str, limit: float) -> Loader:
    """Choose the client: vLLM's where its environment and a tokenizer are known. Raises UsageError."""
    if choice not in CHOICES:
        raise UsageError(f"there is no client {choice!r}", f"there are {', '.join(CHOICES)}", "--client own")
    usable = python is not None and python.exists() and bool(tokenizer)
    if choice == "vllm" and not usable:
        why = "it needs an environment with vLLM and a tokenizer's folder"
        raise UsageError("vllm bench serve cannot run here", why, "./inv up, or give --tokenizer DIR, or --client own")
    return Loader(python if usable and choice != "own" else None, tokenizer, limit)


@dataclass(frozen=True)
class Bench:
    """Everything that stays the same over the configurations of one command."""

    endpoint: Endpoint
    loader: Loader
    baselines: Baselines
    gate: Gate
    text: str
    client: Client

    def measure(self, config: Config, progress: Callable[[str], None]) -> Result:
        """Run one configuration and return its result, whatever happens to the server."""
        begun, done = time.monotonic(), [0]

        def advance(count: int) -> None:
            """Count requests that ended, well or not."""
            done[0] += count
            progress(f"{done[0]} of {config.num_prompts}")

        made: Load | None = None
        try:
            made = self.loader.run(self.endpoint, config, self.text, advance)
            checks = judge.judge(made, config)
        except SparkforgeError as error:
            checks = [Check(name="the load ran to its end", ok=False, told=f"{error.what}: {error.why}")]
        return self._result(config, made, checks, time.monotonic() - begun)

    def _result(self, config: Config, made: Load | None, checks: list[Check], seconds: float) -> Result:
        figures = samples.metrics(made, config) if made else None
        shape = (config.isl, config.osl, config.conc)
        good = all(check.ok for check in checks) and figures is not None
        return Result(
            passed=good and self.gate.passed,
            config=config,
            gate=self.gate,
            checks=checks,
            metrics=figures,
            ratios=ratios(figures, shape, self.baselines.figures) if figures and good else [],
            requests=[sample.row() for sample in made.samples if not sample.error] if made else [],
            client=self.client,
            server=server(self.endpoint),
            machine=facts(),
            seconds=round(seconds, 3),
        )
