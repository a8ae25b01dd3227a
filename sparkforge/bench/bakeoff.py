"""Runs gate and load on one server after another and ranks those that pass everything.

The servers are a TOML file: each with a name and a URL, and a command if it is to be started and ended here. An entry
with `backends` is one server for each of them; `{backend}` in its command becomes the backend's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from rich.table import Table

from sparkforge.bench import batch, page, runs
from sparkforge.bench.endpoint import Endpoint, wait_until_ready
from sparkforge.bench.page import Cell, SortableTable
from sparkforge.bench.schema import Result
from sparkforge.core.console import console, say
from sparkforge.core.documents import DocumentError, read_toml
from sparkforge.core.errors import BenchmarkError, ServerError, SparkforgeError, UsageError
from sparkforge.core.files import write_atomic, write_json
from sparkforge.core.paths import ROOT
from sparkforge.core.process import Child
from sparkforge.core.tables import Record


class Contestant(Record):
    """A server as the file describes it."""

    name: str = Field(pattern=r"^[\w .+-]+$")
    url: str
    command: list[str] = Field(default=[])
    backends: list[str] = Field(default=[])
    environment: dict[str, str] = Field(default={})
    ready_seconds: float = 1800.0

    def expand(self) -> list[Contestant]:
        """Return one server for each backend, or itself."""
        if not self.backends:
            return [self]
        return [
            self.model_copy(
                update={
                    "name": f"{self.name} {backend}",
                    "command": [argument.replace("{backend}", backend) for argument in self.command],
                    "backends": [],
                }
            )
            for backend in self.backends
        ]


class Contestants(Record):
    """The whole file."""

    servers: list[Contestant] = Field(min_length=1)


class Standing(Record):
    """How one server did."""

    name: str
    score: float | None = Field(description="geometric mean of tput_per_gpu over all configurations; None if it failed")
    results: list[Result]
    why: str = ""

    @property
    def bits_per_byte(self) -> float | None:
        """The gate's figure; None if nothing was measured."""
        return self.results[0].gate.bits_per_byte if self.results else None


def load(path: Path) -> list[Contestant]:
    """Read the file. Raises UsageError."""
    fix = "see docs/guide/benchmark.md, Bakeoff"
    try:
        servers = Contestants.model_validate(read_toml(path)).servers
    except OSError as error:
        raise UsageError(f"cannot read {path}", error.strerror or str(error), fix) from error
    except (DocumentError, ValidationError) as error:
        raise UsageError(f"{path.name} lists no servers", str(error).splitlines()[0], fix) from error
    expanded = [contestant for server in servers for contestant in server.expand()]
    if len({contestant.name for contestant in expanded}) < len(expanded):
        raise UsageError(f"{path.name} names a server twice", "each needs a name of its own", fix)
    return expanded


def main(flags: Mapping[str, Any], python: Path) -> None:
    """Measure all of them, print and write the ranking. Raises BenchmarkError if none passed."""
    output = batch.output_folder(flags.get("output", "")) / "bakeoff"
    measured = [measure(contestant, flags, python, output) for contestant in load(Path(flags["file"]))]
    standings = ranked(measured)
    show(standings, output, "server")
    if standings[0].score is None:
        raise nobody_passed(standings, "server", f"less {output}/*/server.log")


def ranked(standings: Sequence[Standing]) -> list[Standing]:
    """Return them with the fastest first and those that failed last, in the order that they came."""
    return sorted(standings, key=lambda standing: -(standing.score or 0.0))


def show(standings: Sequence[Standing], output: Path, kind: str) -> None:
    """Print the ranking and write it below `output` as JSON and as a page. `kind` is what was ranked."""
    write_json(output / "bakeoff.json", [standing.model_dump(mode="json") for standing in standings])
    write_atomic(output / "bakeoff.html", render(standings, kind))
    table = Table("rank", kind, page.PER_GPU, "bits/byte", "", title="bakeoff: geometric mean over all configurations")
    for rank, standing in enumerate(standings, 1):
        passed = standing.score is not None
        score, bits = page.format_optional(standing.score), page.format_optional(standing.bits_per_byte)
        table.add_row(str(rank) if passed else "-", standing.name, score, bits, standing.why[:200])
    console().print(table)
    say(f"report:  {output / 'bakeoff.html'}")


def nobody_passed(standings: Sequence[Standing], kind: str, fix: str) -> BenchmarkError:
    """Return the error for a bake-off without a winner."""
    why = "\n        ".join(f"{standing.name}: {standing.why}" for standing in standings)
    return BenchmarkError(f"no {kind} passed", why, fix, code="benchmark.bakeoff")


def standing(name: str, results: Sequence[Result]) -> Standing:
    """Return how a server with these results did."""
    reasons = [reason for result in results for reason in result.reasons]
    score = None if reasons else mean_throughput(results)
    return Standing(name=name, score=score, results=list(results), why="; ".join(reasons))


def measure(contestant: Contestant, flags: Mapping[str, Any], python: Path, output: Path) -> Standing:
    """Start a server if it has a command, measure it, end it. A failure becomes its standing."""
    say(f"— {contestant.name}")
    folder = output / contestant.name.replace(" ", "-")
    child: Child | None = None
    try:
        if contestant.command:
            log = folder / "server.log"
            child = Child(contestant.command, log=log, env=contestant.environment, cwd=ROOT)
            _wait(contestant, child, log)
        own: dict[str, Any] = {"url": contestant.url, "port": "", "output": str(folder), "fresh": True}
        results = runs.measure({**flags, **own}, python).results
    except SparkforgeError as error:
        return Standing(name=contestant.name, score=None, results=[], why=f"{error.what}: {error.why}")
    finally:
        if child:
            child.end()
    return standing(contestant.name, results)


def _wait(contestant: Contestant, child: Child, log: Path) -> None:
    endpoint = Endpoint(contestant.url, read_seconds=5.0)
    if not wait_until_ready(endpoint, contestant.ready_seconds, lambda: child.poll() is None):
        raise ServerError(
            f"{contestant.name} did not start",
            "it ended or offered no model in time",
            f"less {log}",
            code="server.start",
        )


def mean_throughput(results: Sequence[Result]) -> float | None:
    """Return the geometric mean of tput_per_gpu; None without a figure."""
    figures = [result.metrics.tput_per_gpu for result in results if result.metrics]
    return math.exp(sum(map(math.log, figures)) / len(figures)) if figures and min(figures) > 0 else None


def render(standings: Sequence[Standing], kind: str) -> str:
    """Return the ranking as a page."""
    rows: list[list[Cell]] = [
        [rank if passed else None, standing.name, passed, standing.score, standing.bits_per_byte, standing.why]
        for rank, standing in enumerate(standings, 1)
        for passed in [standing.score is not None]
    ]
    headings = ("rank", kind, "verdict", page.PER_GPU, "bits/byte", "why")
    ranking = SortableTable("geometric mean over all configurations", headings, rows)
    return page.render("bakeoff.html.jinja", "Bakeoff", ranking=ranking)
