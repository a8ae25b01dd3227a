"""What the verbs do, from options to files: gate, then load, then tables and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench import baselines, batch, compare, context, gate, lm_eval, report, settings, terminal
from bench.baselines import Baselines, Threshold
from bench.endpoint import READ_SECONDS, Endpoint
from bench.gate import Passage
from bench.measure import LIMIT_SECONDS, Bench, loader
from bench.schema import Config, Gate, Result
from bench.settings import Settings, whole
from sparkforge import paths
from sparkforge.console import Steps, say
from sparkforge.errors import BatchFailedError, LoadFailedError, UsageError
from sparkforge.files import locked, write_atomic


@dataclass(frozen=True)
class Prepared:
    """What every run needs: where, against what, and which words were given."""

    flags: Mapping[str, str]
    settings: Settings
    baselines: Baselines
    endpoint: Endpoint
    passage: Passage
    output: Path


def prepare(flags: Mapping[str, str]) -> Prepared:
    """Find the server and read the table. Raises UsageError, ServerReplyError, BaselineError."""
    told = Settings({name: flags.get(name, "") for name in settings.NAMES})
    table = baselines.load()
    silence = float(whole(flags.get("silence", "") or str(int(READ_SECONDS)), "--silence", 1))
    at = settings.endpoint(told, flags.get("url", ""), silence)
    passage = gate.passage(table, flags.get("text", ""))
    return Prepared(flags, told, table, at, passage, batch.root(flags.get("output", "")))


def accuracy(flags: Mapping[str, str]) -> Gate:
    """Run the gate alone and show it. Raises GateFailedError, GateUndecidedError."""
    ready = prepare(flags)
    if flags.get("record"):
        return _record(ready)
    return _gate(ready)


@dataclass(frozen=True)
class Outcome:
    """What a run left: its results, their files and the report."""

    results: list[Result]
    files: list[Path]
    page: Path

    def require(self) -> None:
        """Raise for results that failed, or that are worse than the accepted ones.

        Raises LoadFailedError for a single configuration, BatchFailedError for a batch, RegressionError.
        """
        _require(self.results, self.page.parent)
        compare.require_no_regression(self.results)


def performance(flags: Mapping[str, str], python: Path) -> None:
    """Run everything and require that it passed. Raises what `measure` and `Outcome.require` raise."""
    measure(flags, python).require()


def measure(flags: Mapping[str, str], python: Path) -> Outcome:
    """Run the gate, then every configuration, and show them. Raises GateFailedError before any load."""
    ready = prepare(flags)
    configs = settings.configs(ready.settings, ready.baselines, ready.endpoint, _seed(flags), flags.get("warmups", ""))
    name = _file_name(ready.settings, configs)
    with locked(paths.state() / "bench.lock", "run a benchmark beside another"):
        bench = _bench(ready, python)
        made = _batch(ready, bench, configs) if ready.settings.is_batch else _single(ready, bench, configs[0], name)
    terminal.show(made.results, ready.baselines.figures if flags.get("cited") else [])
    print(made.page.parent if ready.settings.is_batch else made.files[0], flush=True)
    say(f"report: {made.page}")
    return made


def _batch(ready: Prepared, bench: Bench, configs: list[Config]) -> Outcome:
    place = batch.folder(ready.output, batch.plan(bench, configs), fresh=bool(ready.flags.get("fresh")))
    results = batch.run(bench, configs, place)
    report.write(place / "report.html", results, ready.baselines)
    batch.finish(place)
    return Outcome(results, [place / f"{config.name}.json" for config in configs], place / "report.html")


def _single(ready: Prepared, bench: Bench, config: Config, name: str) -> Outcome:
    path = ready.output / name
    result = batch.step(bench, config, path, Steps(1))
    report.write(path.with_suffix(".html"), [result], ready.baselines)
    return Outcome([result], [path], path.with_suffix(".html"))


def _bench(ready: Prepared, python: Path) -> Bench:
    """Choose the client, run the gate and require it."""
    ours = context.ours(ready.endpoint)
    tokenizer = ready.flags.get("tokenizer") or str((ours or {}).get("model", ""))
    limit = float(whole(ready.flags.get("limit") or str(int(LIMIT_SECONDS)), "--limit", 1))
    choice = loader(ready.flags.get("client") or "auto", python, tokenizer, limit)
    made, client = _gate(ready), choice.client()
    say(f"load by {client.name} {client.version}")
    return Bench(ready.endpoint, choice, ready.baselines, made, ready.passage.text, client)


def _gate(ready: Prepared) -> Gate:
    """Run the gate, write accuracy.json, show every check. Raises GateFailedError."""
    tasks = [task for task in ready.flags.get("lm_eval", "").split(",") if task]
    with Steps(1).step("accuracy", f"{ready.endpoint.model} on {ready.passage.name}"):
        extra = lm_eval.checks(ready.endpoint, ready.baselines, tasks)
        made = gate.run(ready.endpoint, ready.baselines, ready.passage, extra)
        write_atomic(ready.output / "accuracy.json", made.model_dump_json(indent=2) + "\n")
        gate.show(made)
        gate.require(made)
    return made


def _record(ready: Prepared) -> Gate:
    """Measure without a threshold and print the row that makes one; the person who pastes it vouches for the model."""
    blank = Threshold(model="*", text=ready.passage.name, source="none yet", date=_today())
    table = ready.baselines.model_copy(update={"gates": [blank], "canaries": []})
    made = gate.run(ready.endpoint, table, ready.passage)
    gate.show(made)
    gate.require(made)
    print(gate.row(ready.endpoint.model, made, _today()), end="")
    return made


def _require(results: list[Result], place: Path) -> None:
    """Raise for results that failed."""
    failed = [result for result in results if not result.passed]
    if not failed:
        return
    told = "\n        ".join(f"CONC={result.config.conc}: {'; '.join(result.reasons)}" for result in failed)
    if len(results) == 1:
        raise LoadFailedError("the load's figures cannot be believed", told, "./inv logs, then run the same command")
    what = f"{len(failed)} of {len(results)} configurations failed"
    raise BatchFailedError(what, told, f"less {place / 'summary.txt'}; --fresh runs all of them again")


def _file_name(told: Settings, configs: list[Config]) -> str:
    name = told.text("result_filename").removesuffix(".json") or configs[0].name
    if Path(name).name != name or name.startswith("."):
        raise UsageError(f"RESULT_FILENAME={name} is no file name", "it may not name a folder", "--output FOLDER")
    return f"{name}.json"


def _seed(flags: Mapping[str, str]) -> int:
    return whole(flags.get("seed") or "0", "--seed", 0)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
