"""`./inv bench.profile`: run vLLM's torch profiler on a server under a small load, and evaluate the trace."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.box import SIMPLE
from rich.table import Table

from lab import trace
from lab.trace import Breakdown
from sparkforge.bench import baselines, context, load, runs, settings
from sparkforge.bench.options import OPTIONS
from sparkforge.bench.report import format_figure
from sparkforge.bench.schema import Config, ServedModel
from sparkforge.bench.settings import MAX_VALUE, BenchSettings
from sparkforge.core import paths
from sparkforge.core.console import Steps, console, echo
from sparkforge.core.docker import docker
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.files import locked, sha256_file, write_json
from sparkforge.core.openai import Endpoint
from sparkforge.core.program import ArgumentParser, exit_code, parse_whole
from sparkforge.core.tables import Record
from sparkforge.serve import command_line
from sparkforge.serve.record import Server

HEAVIEST = 20  # printed operators; the JSON file has all
# A trace grows with every operator of every step. This load gives stable shares and a trace that is read in seconds.
DEFAULTS = {"isl": "512", "osl": "32", "conc": "4"}
START, STOP = "/start_profile", "/stop_profile"
LONGEST_NAME = 60  # characters of a kernel's name that are shown; templates of C++ have thousands
PROCESSORS = {"gpu": "kernels and copies on the GPU", "cpu": "operators of the thread that runs the model"}


class TraceProfile(Record):
    """`profile.json`: a profiled load, or an existing trace without configuration and server."""

    format: Literal["sparkforge-profile/1"] = "sparkforge-profile/1"
    trace: str = Field(description="file name of the trace that the figures are of")
    traces: dict[str, str] = Field(description="file name → sha256 of each worker's trace")
    breakdown: Breakdown
    config: Config | None = None
    server: ServedModel | None = None
    machine: dict[str, Any] = Field(default={})


def run(flags: Mapping[str, str]) -> None:
    """Profile a server or read the trace `trace`; print and write it. Raises UsageError, ServerError, InputError."""
    stamp, output = f"{datetime.now(UTC):%Y%m%d_%H%M%S}", runs.output_folder(flags.get("output", ""))
    if flags.get("trace"):
        path, folder = Path(flags["trace"]), output / f"profile_{stamp}"
        profile = TraceProfile(trace=path.name, breakdown=trace.read(path), traces={path.name: sha256_file(path)})
    else:
        with locked(paths.state() / "bench.lock", "run a benchmark beside another"):
            profile, folder = measure(flags, output, stamp)
    write_json(folder / "profile.json", profile.model_dump(mode="json"))
    breakdown = profile.breakdown
    of = PROCESSORS[breakdown.processor]
    parts = Table("part", "%", "ms", "what it is", title=f"parts, waiting included · {of}", box=SIMPLE)
    for group in breakdown.groups:
        parts.add_row(group.name, format_figure(group.share * 100), format_figure(group.ms), group.about)
    heaviest = breakdown.operators[:HEAVIEST]
    title = f"heaviest operators, {len(heaviest)} of {len(breakdown.operators)}, without the time of what they call"
    operators = Table("operator", "part", "%", "ms", "calls", title=f"{title} · {of}", box=SIMPLE)
    for row in heaviest:
        name = row.name if len(row.name) <= LONGEST_NAME else f"{row.name[: LONGEST_NAME - 1]}…"
        operators.add_row(name, row.group, format_figure(row.share * 100), format_figure(row.ms), str(row.calls))
    console().print(parts, operators)
    echo(str(folder))


def measure(flags: Mapping[str, str], output: Path, stamp: str) -> tuple[TraceProfile, Path]:
    """Profile a load on this checkout's server; return the profile and the new folder of its traces.

    Raises UsageError for a server that this checkout did not start, ServerError for one without a profiler.
    """
    shape = {name: flags.get(name) or os.environ.get(OPTIONS[name].variable) or DEFAULTS[name] for name in DEFAULTS}
    conc = parse_whole(shape["conc"], "--conc", 1, MAX_VALUE)  # a single number, unlike in a batch
    each = dict.fromkeys(("num_prompts", "warmups"), str(conc))
    options = BenchSettings({**shape, **each, "port": flags.get("port"), "limit": flags.get("limit")})
    seconds, table, endpoint = options.number("limit"), baselines.load(), settings.endpoint(options)
    if (own := context.own_server(endpoint)) is None:
        why = "its traces would be on its own machine: this checkout did not start it"
        fix = "--help   # copy a trace here, and name it with --trace"
        raise UsageError(f"{endpoint.url} cannot be profiled", why, fix)
    config = settings.configs(options, table, endpoint)[0]
    name = f"profile_isl{config.isl}_osl{config.osl}_conc{config.conc}_{stamp}"
    steps, text = Steps(2), table.texts[0].read()
    with steps.step("load", f"{config.shape}, profiled"):
        count, seeds = config.num_prompts, (config.seed + 1, config.seed)
        warmup, prompts = (load.draw_prompts(endpoint, config, text, count, seed) for seed in seeds)
        load.require_answers(load.send(endpoint, warmup, config.conc, seconds))
        with profiling(endpoint, name):
            load.require_answers(load.send(endpoint, prompts, config.conc, seconds))
    with steps.step("trace") as tell:
        files = move_traces(collect(own), name, output / name)
        profile = TraceProfile(
            trace=files[0].name,
            traces={file.name: sha256_file(file) for file in files},
            breakdown=trace.read(files[0]),
            config=config,
            server=context.describe_server(endpoint),
            machine=context.facts(),
        )
        tell(f"{files[0].name}, {files[0].stat().st_size / 1e6:.1f} MB")
    return profile, output / name


@contextmanager
def profiling(endpoint: Endpoint, prefix: str) -> Iterator[None]:
    """Context in which the server's profiler runs; its traces' names begin with `prefix`. Raises ServerError."""
    _ask(endpoint, START, {"profile_prefix": prefix})
    try:
        yield
    finally:  # also if the load fails, because a running profiler slows the server and fills its memory
        _ask(endpoint, STOP, {})


def _ask(endpoint: Endpoint, path: str, body: Mapping[str, str]) -> None:
    response = endpoint.send(path, body)
    if response.status_code == 404:
        why, fix = "it was started without --profiler", "./inv down && ./inv up --profiler"
        raise ServerError(f"{endpoint.url} has no profiler", why, fix, code="server.reply")
    if not response.is_success:
        why = " ".join(response.text.split())[:300]
        raise ServerError(f"{path} answered {response.status_code}", why, "./inv logs", code="server.reply")


def collect(server: Server) -> Path:
    """Return the folder of a server's traces; traces in a container are moved to our folder. Raises EngineError."""
    folder = command_line.traces_folder()
    if server.container:
        folder.mkdir(parents=True, exist_ok=True)
        docker(["cp", f"{server.container}:{command_line.TRACES_IN_CONTAINER}/.", folder])
        docker(["exec", server.container, "rm", "-r", command_line.TRACES_IN_CONTAINER])  # vLLM makes it again
    return folder


def move_traces(source: Path, prefix: str, target: Path) -> list[Path]:
    """Move the profiler's files with `prefix` to `target`; return the traces by rank. Raises ServerError for none."""
    written = sorted(source.glob(f"{prefix}*"))
    target.mkdir(parents=True, exist_ok=True)
    files = [Path(shutil.move(file, target / file.name)) for file in written]
    traces = [file for file in files if ".pt.trace.json" in file.name]
    if not traces:
        why = f"nothing in {source} begins with {prefix}"
        raise ServerError("the profiler wrote no trace", why, "./inv logs", code="server.reply")
    return traces


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    parser = ArgumentParser(prog="python -m lab.profile", description=__doc__, allow_abbrev=False)
    for name in (*DEFAULTS, "port", "limit", "output", "trace"):
        parser.add_argument(f"--{name}", default="", help="as ./inv bench.profile --help says")
    return exit_code(lambda: run(vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
