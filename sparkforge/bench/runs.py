"""The benchmark commands, from options to files: gate, then load, then tables and report.

A batch measures several configurations and writes one result file for each into a folder. After a kill, the next run
continues the batch. `batch.json` identifies the batch: it is written first, and its key `complete` is set last. A
result is used again only for the same configurations, server version and client.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.bench import baselines, gate, load, report, schema, settings
from sparkforge.bench import text as texts
from sparkforge.bench.baselines import AccuracyThreshold, Baselines, compare_with_competition, compute_ratios
from sparkforge.bench.context import describe_server, facts
from sparkforge.bench.gate import Passage
from sparkforge.bench.load import CLIENT, FinishedLoad
from sparkforge.bench.report import PER_GPU
from sparkforge.bench.schema import Config, Gate, Result, ResultCheck
from sparkforge.bench.settings import BenchSettings
from sparkforge.core import paths
from sparkforge.core.console import Steps, echo, safe, say
from sparkforge.core.errors import BenchmarkError, InputError, SparkforgeError, UsageError
from sparkforge.core.files import locked, read_json, write_atomic, write_json
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
            checks = load.check_load(finished, config)
        except SparkforgeError as error:
            checks = [ResultCheck(name="the load ran to its end", ok=False, told=f"{error.what}: {error.why}")]
        figures = load.compute_metrics(finished, config) if finished else None
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


def batch_plan(bench: Bench, configs: Sequence[Config]) -> dict[str, Any]:
    """Return the settings that identify a batch."""
    shapes = [config.model_dump(mode="json") for config in configs]
    return {"configs": shapes, "server_version": bench.endpoint.version(), "client": CLIENT.model_dump()}


def batch_folder(output: Path, wanted: dict[str, Any], *, fresh: bool) -> Path:
    """Return the folder of the newest unfinished batch with the same plan; else a new one with its plan."""
    shape = wanted["configs"][0]
    stem = f"batch_isl{shape['isl']}_osl{shape['osl']}_"
    if not fresh:
        # glob would treat an unreadable folder as empty, and a second batch would begin.
        names = [path.name for path in output.iterdir()] if output.is_dir() else []
        for batch in (output / name for name in sorted(names, reverse=True) if name.startswith(stem)):
            saved = _read_plan(batch)
            if saved.get("plan") == wanted and not saved.get("complete"):
                say(f"continuing {batch.name}")
                return batch
    batch = output / f"{stem}{datetime.now(UTC):%Y%m%d_%H%M%S}"
    while batch.exists():  # two within one second
        batch = batch.with_name(f"{batch.name}_")
    write_json(batch / PLAN, {"plan": wanted, "complete": False})
    return batch


def _read_plan(batch: Path) -> dict[str, Any]:
    """Return a batch's plan, empty if it has none. An unreadable plan is an error: a second batch would begin."""
    try:
        value = read_json(batch / PLAN)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def run_all(bench: Bench, files: Mapping[Path, Config], *, is_batch: bool) -> list[Result]:
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
    write_json(batch / PLAN, {**_read_plan(batch), "complete": True})


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


GATE_NAME = "accuracy"  # of the gate's file, beside the results
LONGEST_NAME = 200  # bytes; file systems take 255, with the suffix and a temporary file's random part


@dataclass(frozen=True)
class Prepared:
    """The inputs of every run: the options, the server, the text to score, and the folder for results."""

    settings: BenchSettings
    baselines: Baselines
    endpoint: Endpoint
    passage: Passage
    output: Path


def prepare(flags: Mapping[str, Any]) -> Prepared:
    """Find the server, the text and the table. Raises UsageError, ServerError, InputError."""
    options, table = BenchSettings(flags), baselines.load()
    endpoint = settings.endpoint(options)
    passage = gate.passage(table, flags.get("text", ""), endpoint.model)
    return Prepared(options, table, endpoint, passage, output_folder(flags.get("output", "")))


def check(flags: Mapping[str, Any], model: str, longest: int) -> tuple[list[Config], Passage]:
    """Check the options, without a request, for a server of `model` with `longest` tokens of context.

    Return the configurations and the text. Raises UsageError for an invalid option, InputError for a missing text.
    """
    options, table = BenchSettings(flags), baselines.load()
    bounded = BenchSettings({**flags, "max_model_len": str(options.number("max_model_len", 0) or longest)})
    configs = settings.configs(bounded, table, Endpoint("http://127.0.0.1", model))
    _file_name(options, configs)
    for name in ("silence", "limit"):
        options.number(name)
    return configs, gate.passage(table, flags.get("text", ""), model)


def run_gate(flags: Mapping[str, Any]) -> Gate:
    """Run the gate alone and print it. Raises BenchmarkError.

    `fetch_text` first fetches the text; `record` measures without a threshold.
    """
    if source := flags.get("fetch_text"):
        texts.fetch(source)
    prepared = prepare(flags)
    for name in ("isl", "osl", "num_prompts"):  # of the load; the gpt-oss competition passes them to the gate too
        prepared.settings.number(name, 0)
    return _record(prepared) if flags.get("record") else _gate(prepared)


@dataclass(frozen=True)
class RunOutcome:
    """The results of a run and their files."""

    results: list[Result]
    files: list[Path]

    def require(self) -> None:
        """Raise BenchmarkError if a result failed."""
        failed = [result for result in self.results if not result.passed]
        reasons = "\n        ".join(f"CONC={result.config.conc}: {'; '.join(result.reasons)}" for result in failed)
        if failed and len(self.results) == 1:
            fix = "./inv logs   # then the same command again"
            raise BenchmarkError("the load's figures are not valid", reasons, fix, code="benchmark.load")
        if failed:
            problem = f"{len(failed)} of {len(self.results)} configurations failed"
            fix = f"less {self.files[0].parent}/summary.txt; the same command repeats the failed ones, with --fresh all"
            raise BenchmarkError(problem, reasons, fix, code="benchmark.batch")


def run_benchmark(flags: Mapping[str, Any]) -> None:
    """Run everything and require that it passed. Raises the errors of `measure` and `RunOutcome.require`."""
    measure(flags).require()


def measure(flags: Mapping[str, Any], judge: Callable[[Gate], None] = gate.require) -> RunOutcome:
    """Run the gate, then measure and print every configuration. `judge` raises an error for a gate that it refuses.

    Raises BenchmarkError for a failed gate, and the errors of `judge` and `prepare`.
    """
    prepared = prepare(flags)
    configs = settings.configs(prepared.settings, prepared.baselines, prepared.endpoint)
    limit, name = prepared.settings.number("limit"), _file_name(prepared.settings, configs)
    with locked(paths.state() / "bench.lock", "run a benchmark beside another"):
        verdict = _gate(prepared)
        judge(verdict)
        bench = Bench(prepared.endpoint, limit, prepared.baselines, verdict, prepared.passage.text)
        files, is_batch = {prepared.output / name: configs[0]}, prepared.settings.is_batch
        if is_batch:
            folder = batch_folder(prepared.output, batch_plan(bench, configs), fresh=bool(flags.get("fresh")))
            files = {folder / f"{config.name}.json": config for config in configs}
        outcome = RunOutcome(run_all(bench, files, is_batch=is_batch), list(files))
        if is_batch and all(result.passed for result in outcome.results):
            finish(folder)
    report.print_results(outcome.results)
    echo(str(outcome.files[0].parent if is_batch else outcome.files[0]))
    return outcome


def _gate(prepared: Prepared) -> Gate:
    threshold = prepared.baselines.threshold(prepared.endpoint.model, prepared.passage.name)
    name = "sanity" if threshold and threshold.reference is None else "accuracy"
    with Steps(1).step(name, f"{prepared.endpoint.model} on {prepared.passage.name}"):
        verdict = gate.run(prepared.endpoint, prepared.baselines, prepared.passage)
        write_atomic(prepared.output / f"{GATE_NAME}.json", verdict.model_dump_json(indent=2) + "\n")
        gate.print_gate(verdict)
        gate.require(verdict)
    return verdict


def _record(prepared: Prepared) -> Gate:
    """Measure without a threshold and print a row for the table. A user should add the row only for a correct model."""
    today = datetime.now(UTC).date().isoformat()
    blank = AccuracyThreshold(model="*", text=prepared.passage.name, source="none yet", date=today)
    table = prepared.baselines.model_copy(update={"gates": [blank], "canaries": []})
    verdict = gate.run(prepared.endpoint, table, prepared.passage)
    gate.print_gate(verdict)
    gate.require(verdict)
    echo(gate.threshold_row(prepared.endpoint.model, verdict, len(prepared.passage.text.encode()), today), end="")
    return verdict


def _file_name(options: BenchSettings, configs: list[Config]) -> str:
    """Return the file name of a single configuration's result. Raises UsageError for an invalid name."""
    name = options.text("result_filename").removesuffix(".json") or configs[0].name
    shown = ascii(name)  # it may contain control characters of a terminal
    if Path(name).name != name or name.startswith("."):
        raise UsageError(f"RESULT_FILENAME={shown} is no file name", "it may not name a folder", "--output FOLDER")
    if not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        why = f"it takes printable characters only, at most {LONGEST_NAME} bytes"
        raise UsageError(f"RESULT_FILENAME={shown} is no file name", why, "RESULT_FILENAME=NAME")
    if name.casefold() == GATE_NAME:
        why = f"{GATE_NAME}.json holds the gate's own result"
        raise UsageError(f"RESULT_FILENAME={shown} is taken", why, "RESULT_FILENAME=NAME")
    return f"{name}.json"
