"""Results in the formats that owners of a DGX Spark exchange: llama-benchy's, and the files of a Spark Arena entry.

Facts, not code, from llama-benchy 0.3.0 (MIT; schemas/benchmark_report_schema.json, README.md) and sparkrun 0.2.40
(Apache-2.0; the client of the Spark Arena; src/sparkrun/cli/_arena.py, benchmarking/base.py). Nothing is posted.

llama-benchy sends `concurrency` requests at once, waits for all of them, and repeats that. bench.perf sends the next
request as soon as one ends. So speeds of all requests together are given only for loads of a single such round
(`--num-prompts` equal to `--conc`); of others they are null, and only the speeds of each request are given.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sparkforge import __version__, pins
from sparkforge.bench import schema
from sparkforge.bench.schema import Request, Result
from sparkforge.core.console import echo, say
from sparkforge.core.errors import InputError, UsageError
from sparkforge.core.files import write_atomic, write_json
from sparkforge.core.tables import Record
from sparkforge.image.devices import CPU
from sparkforge.models import table as models
from sparkforge.serve import profiles
from sparkforge.serve.profiles import ServeProfile

FORMS = ("llama-benchy", "llama-benchy-csv", "llama-benchy-md", "spark-arena")
SUFFIXES = dict(zip(FORMS, (".json", ".csv", ".md", ""), strict=True))
# llama-benchy's columns: name in its Markdown, name in its CSV, and whether Markdown has it at concurrency 1 too.
COLUMNS = (
    ("t/s (total)", "t_s", True),
    ("t/s (req)", "t_s_req", False),
    ("peak t/s", "peak_ts", True),
    ("peak t/s (req)", "peak_ts_req", False),
    ("ttfr (ms)", "ttfr", True),
    ("est_ppt (ms)", "est_ppt", True),
    ("e2e_ttft (ms)", "e2e_ttft", True),
)


class Metric(Record):
    """llama-benchy's BenchmarkMetric: mean, standard deviation (of the population) and every value."""

    mean: float
    std: float
    values: list[float]


class BenchyRow(Record):
    """llama-benchy's BenchmarkRun: one shape at one concurrency. Tokens a second, and milliseconds."""

    concurrency: int
    context_size: int = 0
    prompt_size: int
    response_size: int
    is_context_prefill_phase: bool = False
    pp_throughput: Metric | None
    pp_req_throughput: Metric | None
    tg_throughput: Metric | None
    tg_req_throughput: Metric | None
    peak_throughput: None = None  # needs the time of every token, which results do not hold
    peak_req_throughput: None = None
    ttfr: Metric | None
    est_ppt: Metric | None
    e2e_ttft: Metric | None
    throughput_over_time: None = None
    requests_throughput_over_time: None = None


class Report(Record):
    """llama-benchy's BenchmarkReport. No latency is measured and taken off, so its mode is `none`."""

    version: str
    timestamp: str
    latency_mode: str = "none"
    latency_ms: float = 0.0
    model: str
    prefix_caching_enabled: bool = False
    max_concurrency: int
    benchmarks: list[BenchyRow]


def main(names: Sequence[str], form: str, output: str, profile: str) -> None:
    """Write results in another form to the file or folder `output`, and print its path.

    Raises UsageError and InputError; a result that did not pass is refused.
    """
    if form not in FORMS:
        raise UsageError(f"there is no form {form!r}", f"there are {', '.join(FORMS)}", f"--form {FORMS[0]}")
    results = read(names)
    target = Path(output) if output else Path(names[0]).with_name(f"{form}{SUFFIXES[form]}")
    if target.is_dir() and form != FORMS[3]:
        raise UsageError(f"{target} is a folder", f"{form} is one file", f"--output {target / form}{SUFFIXES[form]}")
    if form == FORMS[0]:
        write_json(target, report(results).model_dump(mode="json"))
    elif form == FORMS[1]:
        write_atomic(target, as_csv(report(results)))
    elif form == FORMS[2]:
        write_atomic(target, as_markdown(report(results)))
    else:
        write_arena(target, results, profile)
        say("nothing was sent; whether the Spark Arena takes an entry that sparkrun did not measure is not known")
    echo(str(target))


def read(names: Sequence[str]) -> list[Result]:
    """Return the results of files, and of the folders of batches. Raises InputError or UsageError."""
    files = [
        file
        for name in names
        for file in (sorted(Path(name).glob("result_*.json")) if Path(name).is_dir() else [Path(name)])
    ]
    if not files:
        raise UsageError(f"there is no result in {', '.join(names)}", "a batch has result_*.json", "./inv bench.perf")
    results = [schema.read(file) for file in files]
    for file, result in zip(files, results, strict=True):
        if not result.passed or not result.requests:
            why = "; ".join(result.reasons) or "it holds no requests"
            raise InputError(f"{file.name} did not pass", why, "name results that passed", code="input.result")
    if len({(result.config.model, result.client.name) for result in results}) > 1:
        why = "a report is of one model and one load client"
        raise InputError("these results do not belong together", why, "export each by itself", code="input.result")
    return results


def report(results: Sequence[Result]) -> Report:
    """Return results of one model as llama-benchy's report; those of the same shape and concurrency are its runs."""
    shapes = defaultdict[tuple[int, int, int], list[Result]](list)
    for result in results:
        shapes[result.config.isl, result.config.osl, result.config.conc].append(result)
    measured = str(results[0].machine.get("measured_at", ""))
    return Report(
        version=f"sparkforge {__version__}",
        timestamp=f"{_time(measured):%Y-%m-%d %H:%M:%SZ}",
        model=results[0].config.model,
        max_concurrency=max(conc for _, _, conc in shapes),
        benchmarks=[_run(*shape, shapes[shape]) for shape in sorted(shapes)],
    )


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return datetime.now(UTC)


def _run(isl: int, osl: int, conc: int, results: Sequence[Result]) -> BenchyRow:
    """Return one of llama-benchy's runs; all formulas are its own (its README, "Table Columns")."""
    requests = [request for result in results for request in result.requests]
    first = _metric([request.ttft_ms for request in requests])
    prompt = _metric([1000 * request.prompt_tokens / request.ttft_ms for request in requests if request.ttft_ms > 0])
    answer = _metric([1000 / request.tpot_ms for request in requests if request.tpot_ms])
    rounds = [result.requests for result in results if len(result.requests) <= conc]
    return BenchyRow(
        concurrency=conc,
        prompt_size=isl,
        response_size=osl,
        pp_throughput=prompt if conc == 1 else _metric([_prompt_speed(round_) for round_ in rounds]),
        pp_req_throughput=prompt,
        tg_throughput=answer if conc == 1 else _metric([_answer_speed(round_) for round_ in rounds]),
        tg_req_throughput=answer,
        ttfr=first,
        est_ppt=first,
        e2e_ttft=first,
    )


@dataclass(frozen=True)
class PhaseSpeed:
    """Tokens a second of one phase: of all requests together, and of one request (mean and standard deviation)."""

    test: str
    total: float | None
    per_request: float
    deviation: float
    first_token_ms: float | None


def phase_speeds(result: Result) -> list[PhaseSpeed]:
    """Return prompt processing and token generation as llama-benchy names them (ppN, tgN), as the export has them.

    pp of a request is its prompt's tokens over its time to the first token, so it holds the time in the server's queue;
    the pure speed is the one at concurrency 1. tg is (tokens - 1) over the time after the first token. A result that
    keeps no requests has none of them.
    """
    if not result.passed or not result.requests:
        return []
    config = result.config
    run = _run(config.isl, config.osl, config.conc, [result])
    phases = (
        (f"pp{config.isl}", run.pp_throughput, run.pp_req_throughput, run.ttfr),
        (f"tg{config.osl}", run.tg_throughput, run.tg_req_throughput, None),
    )
    return [
        PhaseSpeed(
            test=f"{name} (c{config.conc})",
            total=total.mean if total else None,
            per_request=per_request.mean,
            deviation=per_request.std,
            first_token_ms=first.mean if first else None,
        )
        for name, total, per_request, first in phases
        if per_request
    ]


def _prompt_speed(requests: Sequence[Request]) -> float:
    """Return all prompts' tokens over the time from the first request to the last one's first token."""
    begin = min(request.start_ms for request in requests)
    end = max(request.start_ms + request.ttft_ms for request in requests)
    return 1000 * sum(request.prompt_tokens for request in requests) / (end - begin) if end > begin else 0.0


def _answer_speed(requests: Sequence[Request]) -> float:
    """Return the tokens behind each first one over the time from the earliest first token to the last token."""
    begin = min(request.start_ms + request.ttft_ms for request in requests)
    end = max(request.start_ms + request.e2el_ms for request in requests)
    return 1000 * sum(request.output_tokens - 1 for request in requests) / (end - begin) if end > begin else 0.0


def _metric(values: Sequence[float]) -> Metric | None:
    values = [value for value in values if value > 0]
    if not values:
        return None
    return Metric(mean=statistics.fmean(values), std=statistics.pstdev(values), values=values)


def _rows(content: Report) -> list[tuple[str, dict[str, Metric | None]]]:
    """Return llama-benchy's rows, a pp and a tg one for each run: the test's name, and figures by CSV name."""
    rows = list[tuple[str, dict[str, Metric | None]]]()
    for run in content.benchmarks:
        suffix = f" (c{run.concurrency})" if content.max_concurrency > 1 else ""
        prompt = {"t_s": run.pp_throughput, "t_s_req": run.pp_req_throughput}
        prompt |= {"ttfr": run.ttfr, "est_ppt": run.est_ppt, "e2e_ttft": run.e2e_ttft}
        rows.append((f"pp{run.prompt_size}{suffix}", prompt))
        rows.append((f"tg{run.response_size}{suffix}", {"t_s": run.tg_throughput, "t_s_req": run.tg_req_throughput}))
    return [(test, figures) for test, figures in rows if any(figures.values())]


def as_csv(content: Report) -> str:
    """Return llama-benchy's CSV; a figure that is not known is an empty field."""
    names = [f"{name}_{part}" for _, name, _ in COLUMNS for part in ("mean", "std")]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["model", "test_name", *names])
    for test, figures in _rows(content):
        cells = [(metric.mean, metric.std) if (metric := figures.get(name)) else ("", "") for _, name, _ in COLUMNS]
        writer.writerow([content.model, test, *(cell for pair in cells for cell in pair)])
    return text.getvalue()


def as_markdown(content: Report) -> str:
    """Return llama-benchy's Markdown table, `mean ± std`; with several requests at once it has more columns."""
    several = content.max_concurrency > 1
    columns = [column for column in COLUMNS if several or column[2]]
    titles = [title if several else title.removesuffix(" (total)") for title, _, _ in columns]
    lines = [["model", "test", *titles], [":---", *["---:"] * (len(columns) + 1)]]
    for test, figures in _rows(content):
        metrics = (figures.get(name) for _, name, _ in columns)
        cells = [f"{metric.mean:.2f} ± {metric.std:.2f}" if metric else "" for metric in metrics]
        lines.append([content.model.replace("|", "\\|"), test, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_arena(folder: Path, results: Sequence[Result], profile: str) -> None:
    """Write the files that sparkrun uploads for an entry: recipe.yaml, benchmark.csv and metadata.json.

    `profile` is the serve profile that the server was started with, which results do not hold. Raises UsageError for an
    unknown one, InputError for results that make no entry: of a machine without a GPU, of a model that models.toml does
    not pin, of several releases of vLLM or one that no GPU's image has, or without speeds of all requests together.
    """
    content = report(results)
    model = f"openai/{content.model}"
    revision = models.pinned_revision(model)
    slow = [run for run in content.benchmarks if run.tg_throughput is None]
    fix = "name results of a server in the container, measured with --num-prompts equal to --conc"
    versions = {result.server.version.partition("+")[0] for result in results}  # without +sparkforge.N
    stacks = [
        name
        for name, stack in pins.load().stacks.items()
        if stack.image and stack.image.device != CPU and versions == {stack.components["vllm"].version}
    ]
    why = ""
    if any(result.server.device in {"embedded", "docker-cpu"} for result in results):
        why = "they were measured without a GPU"
    elif not revision:
        why = f"sparkforge/models/models.toml pins no {model}"
    elif not stacks:
        released = ", ".join(sorted(version or "an unknown vLLM" for version in versions))
        why = f"their servers ran {released}, and the image of a stack has one vLLM of pins.toml"
    elif slow:
        first = f"{slow[0].prompt_size}/{slow[0].response_size} c{slow[0].concurrency}"
        why = f"{first} has more requests than run at once, so llama-benchy's speeds of all of them are not defined"
    if why:
        raise InputError("these results make no entry for the Spark Arena", why, fix, code="input.result")
    config = results[0].config
    image = f"sparkforge/vllm:{stacks[0]}"
    recipe = _recipe(model, image, config.model, config.tp, profiles.named(profile))
    ends = [_time(str(result.machine.get("measured_at", ""))) for result in results]
    start = min(end - timedelta(seconds=result.seconds) for end, result in zip(ends, results, strict=True))
    shapes = {"pp": "prompt_size", "tg": "response_size", "depth": "context_size", "concurrency": "concurrency"}
    metadata = {
        "recipe": {
            "name": f"sparkforge-{profile}",
            "qualified_name": f"sparkforge-{profile}",
            "type": "sparkforge",
            "model": model,
            "hf_model": model,
            "raw_container": image,
            "container": image,
            "container_pinned": False,
            "runtime": "vllm",
            "runtime_full": "vllm",
            "registry": None,
            "registry_git": "",
            "hash": hashlib.sha256(recipe.encode()).hexdigest(),
        },
        "timing": {
            "start": start.isoformat(),
            "end": max(ends).isoformat(),
            "duration": (max(ends) - start).total_seconds(),
        },
        "cluster": {"cluster_id": None, "node_count": config.tp},
        "benchmark": {
            "framework": "sparkforge",
            "profile": None,
            "args": {name: sorted({getattr(run, key) for run in content.benchmarks}) for name, key in shapes.items()},
        },
        "model": {"revision": revision},
        "runtime_info": {},
        "sparkforge": {"version": __version__, "client": results[0].client.name},
    }
    write_atomic(folder / "recipe.yaml", recipe)
    write_atomic(folder / "benchmark.csv", as_csv(content))
    write_json(folder / "metadata.json", metadata)


def _recipe(model: str, image: str, served_name: str, tp: int, profile: ServeProfile) -> str:
    """Return a recipe of sparkrun, version 2: every flag with a value is a default, and the command names it."""
    host = "0.0.0.0"  # noqa: S104 - in the container
    defaults: dict[str, Any] = {"port": 8000, "host": host, "tensor_parallel": tp, "served_model_name": served_name}
    lines = ["vllm serve {model}", "--served-model-name {served_model_name}"]
    lines += ["--tensor-parallel-size {tensor_parallel}", "--host {host}", "--port {port}"]
    for flag, setting in profile.flags.items():
        name = flag.removeprefix("--").replace("-", "_").replace(".", "_")
        lines.append(f"{flag} '{{{name}}}'" if setting.value != "" else flag)
        if setting.value != "":
            defaults[name] = setting.value
    fields = {
        "recipe_version": "2",
        "model": model,
        "runtime": "vllm",
        "min_nodes": tp,
        "max_nodes": tp,
        "container": image,
        "metadata": {"description": f"Sparkforge {__version__}: {profile.about}"},
        "defaults": defaults,
        "env": profile.variables(),
    }
    # JSON is YAML: only the command, which people read and change, is written as a block.
    head = "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in fields.items())
    return head + "command: |\n" + " \\\n".join(f"  {line}" for line in lines) + "\n"
