"""Runs configurations one after another into a folder that a killed run leaves whole and the next run goes on with.

`batch.json` is written first and says what belongs to the batch; each configuration's result is there or not there; the
last write sets `complete`. A result is used again only for the same configurations, server version and client.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import schema
from bench.measure import Bench
from bench.schema import Config, Result
from sparkforge import paths
from sparkforge.console import Steps, say
from sparkforge.errors import ResultError
from sparkforge.files import write_atomic, write_json

PLAN = "batch.json"


def root(output: str) -> Path:
    """Return the folder that results go to."""
    return paths.typed(output).absolute() if output else paths.state() / "bench"


def plan(bench: Bench, configs: Sequence[Config]) -> dict[str, Any]:
    """Return what identifies a batch."""
    return {
        "configs": [config.model_dump(mode="json") for config in configs],
        "server_version": bench.endpoint.version(),
        "client": bench.client.model_dump(),
    }


def folder(output: Path, wanted: dict[str, Any], *, fresh: bool) -> Path:
    """Return the unfinished batch's folder of the very same plan, the newest; else a new one, its plan written."""
    shape = wanted["configs"][0]
    stem = f"batch_isl{shape['isl']}_osl{shape['osl']}_"
    if not fresh:
        for place in sorted(output.glob(f"{stem}*"), reverse=True):
            found = _read(place / PLAN)
            if found.get("plan") == wanted and not found.get("complete"):
                say(f"going on with {place.name}")
                return place
    place = output / f"{stem}{datetime.now(UTC):%Y%m%d_%H%M%S}"
    while place.exists():  # two within one second
        place = place.with_name(f"{place.name}_")
    write_json(place / PLAN, {"plan": wanted, "complete": False})
    return place


def run(bench: Bench, configs: Sequence[Config], place: Path) -> list[Result]:
    """Measure what is missing in `place`; a configuration that fails does not stop the others. Returns all results."""
    steps, results = Steps(len(configs)), list[Result]()
    for config in configs:
        path = place / f"{config.name}.json"
        results.append(step(bench, config, path, steps, again=kept(path)))
        write_atomic(place / "summary.txt", summary(results, len(configs)))
    return results


def step(bench: Bench, config: Config, path: Path, steps: Steps, *, again: Result | None = None) -> Result:
    """Measure one configuration into `path` as a step on the console, or take the result that stands there."""
    results = [again] if again else list[Result]()
    with suppress(FailedStepError), steps.step(f"CONC={config.conc}", f"{config.num_prompts} requests") as tell:
        if not results:
            results.append(bench.measure(config, tell))
            schema.write(path, results[0])
        tell(line(results[0]))
        if not results[0].passed:
            raise FailedStepError
    return results[0]


class FailedStepError(Exception):
    """Ends a step with ✗; the result says why."""


def finish(place: Path) -> None:
    """Mark a batch as complete: the next run begins another."""
    write_json(place / PLAN, {**_read(place / PLAN), "complete": True})


def kept(path: Path) -> Result | None:
    """Return the result that an earlier run of this batch left; None if it left none that can be read."""
    try:
        return schema.read(path) if path.exists() else None
    except ResultError:
        return None


def line(result: Result) -> str:
    """Return one result in one line."""
    if not result.passed or result.metrics is None:
        return "; ".join(result.reasons)
    m = result.metrics
    return (
        f"{m.output_throughput:.1f} output tok/s, {m.tput_per_gpu:.1f} tok/s/GPU, "
        f"median E2E {m.e2el_ms.median:.0f} ms, TTFT {m.ttft_ms.median:.0f} ms"
    )


def summary(results: Sequence[Result], total: int) -> str:
    """Return summary.txt: a line a configuration with ✓ or ✗ and seconds, then the counts."""
    lines = []
    for result in results:
        mark, word = ("✓", "PASSED") if result.passed else ("✗", "FAILED")
        why = "" if result.passed else f": {'; '.join(result.reasons)}"
        lines.append(f"{mark} CONC={result.config.conc}: {word} ({result.seconds:.0f}s){why}")
    passed = sum(result.passed for result in results)
    lines += ["", f"Total tests: {total}", f"Passed: {passed}", f"Failed: {len(results) - passed}"]
    if len(results) < total:
        lines.append(f"Not run yet: {total - len(results)}")
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
