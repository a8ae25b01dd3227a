"""The benchmark commands, from options to files: gate, then load, then tables and report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparkforge.bench import baselines, batch, gate, report, settings, text
from sparkforge.bench.baselines import AccuracyThreshold, Baselines
from sparkforge.bench.batch import Bench
from sparkforge.bench.gate import Passage
from sparkforge.bench.schema import Config, Gate, Result
from sparkforge.bench.settings import BenchSettings
from sparkforge.core import paths
from sparkforge.core.console import Steps, echo
from sparkforge.core.errors import BenchmarkError, UsageError
from sparkforge.core.files import locked, write_atomic
from sparkforge.core.openai import Endpoint

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
    """Find the server and read the table. Raises UsageError, ServerError, InputError."""
    options, table = BenchSettings(flags), baselines.load()
    endpoint = settings.endpoint(options)
    passage = gate.passage(table, flags.get("text", ""), endpoint.model)
    return Prepared(options, table, endpoint, passage, batch.output_folder(flags.get("output", "")))


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
        text.fetch(source)
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
    """Run the gate, let `judge` refuse it too, then run and print every configuration. Raises BenchmarkError."""
    prepared = prepare(flags)
    configs = settings.configs(prepared.settings, prepared.baselines, prepared.endpoint)
    limit, name = prepared.settings.number("limit"), _file_name(prepared.settings, configs)
    with locked(paths.state() / "bench.lock", "run a benchmark beside another"):
        verdict = _gate(prepared)
        judge(verdict)
        bench = Bench(prepared.endpoint, limit, prepared.baselines, verdict, prepared.passage.text)
        files, is_batch = {prepared.output / name: configs[0]}, prepared.settings.is_batch
        if is_batch:
            folder = batch.folder(prepared.output, batch.plan(bench, configs), fresh=bool(flags.get("fresh")))
            files = {folder / f"{config.name}.json": config for config in configs}
        outcome = RunOutcome(batch.run(bench, files, is_batch=is_batch), list(files))
        if is_batch and all(result.passed for result in outcome.results):
            batch.finish(folder)
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
    """Measure without a threshold and print a row for the table; a user who adds this row vouches for the model."""
    today = datetime.now(UTC).date().isoformat()
    blank = AccuracyThreshold(model="*", text=prepared.passage.name, source="none yet", date=today)
    table = prepared.baselines.model_copy(update={"gates": [blank], "canaries": []})
    verdict = gate.run(prepared.endpoint, table, prepared.passage)
    gate.print_gate(verdict)
    gate.require(verdict)
    echo(gate.threshold_row(prepared.endpoint.model, verdict, len(prepared.passage.text.encode()), today), end="")
    return verdict


def _file_name(options: BenchSettings, configs: list[Config]) -> str:
    """Return the name of a single configuration's result. Raises UsageError for one that cannot be used."""
    name = options.text("result_filename").removesuffix(".json") or configs[0].name
    shown = ascii(name)  # control characters would steer the terminal
    if Path(name).name != name or name.startswith("."):
        raise UsageError(f"RESULT_FILENAME={shown} is no file name", "it may not name a folder", "--output FOLDER")
    if not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        why = f"it takes printable characters only, at most {LONGEST_NAME} bytes"
        raise UsageError(f"RESULT_FILENAME={shown} is no file name", why, "RESULT_FILENAME=NAME")
    if name.casefold() == GATE_NAME:
        why = f"{GATE_NAME}.json holds the gate's own result"
        raise UsageError(f"RESULT_FILENAME={shown} is taken", why, "RESULT_FILENAME=NAME")
    return f"{name}.json"
