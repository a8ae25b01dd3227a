"""Runs configurations one after another into a folder; after a kill the next run continues with that folder.

`batch.json` is written first and identifies the batch; each configuration has its own result file; the last write sets
`complete`. A result is used again only for the same configurations, server version and client.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.bench import load, samples, schema
from sparkforge.bench.baselines import Baselines, compare_with_competition, compute_ratios
from sparkforge.bench.context import describe_server, facts, read_table
from sparkforge.bench.load import CLIENT
from sparkforge.bench.report import PER_GPU
from sparkforge.bench.samples import FinishedLoad
from sparkforge.bench.schema import Config, Gate, Result, ResultCheck
from sparkforge.core import paths
from sparkforge.core.console import Steps, safe, say
from sparkforge.core.errors import InputError, SparkforgeError
from sparkforge.core.files import write_atomic, write_json
from sparkforge.core.openai import Endpoint

PLAN = "batch.json"


@dataclass(frozen=True)
class Bench:
    """Everything that stays the same over the configurations of one command."""

    endpoint: Endpoint
    seconds: float  # time limit of the warm-up and of the load
    baselines: Baselines
    gate: Gate
    text: str

    def measure(self, config: Config, progress: Callable[[str], None]) -> Result:
        """Run one configuration and return its result, also if the server fails."""
        start, completed = time.monotonic(), itertools.count(1)
        finished: FinishedLoad | None = None

        def advance() -> None:
            progress(f"{next(completed)} of {config.num_prompts}")

        try:
            finished = load.run(self.endpoint, config, self.text, self.seconds, advance)
            checks = samples.check_load(finished, config)
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
            client=CLIENT,
            server=describe_server(self.endpoint),
            machine=facts(),
            seconds=round(time.monotonic() - start, 3),
        )


def output_folder(output: str) -> Path:
    """Return the folder for results."""
    return paths.typed(output).absolute() if output else paths.state() / "bench"


def plan(bench: Bench, configs: Sequence[Config]) -> dict[str, Any]:
    """Return the settings that identify a batch."""
    shapes = [config.model_dump(mode="json") for config in configs]
    return {"configs": shapes, "server_version": bench.endpoint.version(), "client": CLIENT.model_dump()}


def folder(output: Path, wanted: dict[str, Any], *, fresh: bool) -> Path:
    """Return the folder of the newest unfinished batch with the same plan; else a new one with its plan."""
    shape = wanted["configs"][0]
    stem = f"batch_isl{shape['isl']}_osl{shape['osl']}_"
    if not fresh:
        # Not glob, which treats an unreadable folder as empty, so that a second batch would begin.
        names = [path.name for path in output.iterdir()] if output.is_dir() else []
        for batch in (output / name for name in sorted(names, reverse=True) if name.startswith(stem)):
            saved = read_table(batch / PLAN)
            if saved.get("plan") == wanted and not saved.get("complete"):
                say(f"continuing {batch.name}")
                return batch
    batch = output / f"{stem}{datetime.now(UTC):%Y%m%d_%H%M%S}"
    while batch.exists():  # two within one second
        batch = batch.with_name(f"{batch.name}_")
    write_json(batch / PLAN, {"plan": wanted, "complete": False})
    return batch


def run(bench: Bench, files: Mapping[Path, Config], *, is_batch: bool) -> list[Result]:
    """Measure each configuration into its file; return all results. A failure does not stop the others.

    A batch keeps the passed results of an earlier run, and has a summary.
    """
    steps, results = Steps(len(files)), list[Result]()
    for path, config in files.items():
        with suppress(FailedStepError), steps.step(f"CONC={config.conc}", f"{config.num_prompts} requests") as update:
            result = None
            with suppress(InputError):
                result = schema.read(path) if is_batch else None
            if result is None or not result.passed:
                result = bench.measure(config, update)
                schema.write(path, result)
            results.append(result)
            update(line(result))
            if not result.passed:
                raise FailedStepError
        if is_batch:
            write_atomic(path.with_name("summary.txt"), safe(summary(results, len(files))))
    return results


class FailedStepError(Exception):
    """Ends a step with ✗; the result has the reason."""


def finish(batch: Path) -> None:
    """Mark a batch as complete, so that the next run begins a new one."""
    write_json(batch / PLAN, {**read_table(batch / PLAN), "complete": True})


def line(result: Result) -> str:
    """Return one result in one line."""
    if not result.passed or result.metrics is None:
        return "; ".join(result.reasons)
    m = result.metrics
    return (
        f"{m.output_throughput:.1f} output tok/s, {m.tput_per_gpu:.1f} {PER_GPU}, "
        f"median E2E {m.e2el_ms.median:.0f} ms, TTFT {m.ttft_ms.median:.0f} ms"
    )


def summary(results: Sequence[Result], total: int) -> str:
    """Return summary.txt: one line per configuration with ✓ or ✗ and seconds, then the counts."""
    lines = []
    for result in results:
        mark, verdict = ("✓", "PASSED") if result.passed else ("✗", "FAILED")
        why = "" if result.passed else f": {'; '.join(result.reasons)}"
        lines.append(f"{mark} CONC={result.config.conc}: {verdict} ({result.seconds:.0f}s){why}")
    passed = sum(result.passed for result in results)
    lines += ["", f"Total tests: {total}", f"Passed: {passed}", f"Failed: {len(results) - passed}"]
    if len(results) < total:
        lines.append(f"Not run yet: {total - len(results)}")
    return "\n".join(lines) + "\n"
