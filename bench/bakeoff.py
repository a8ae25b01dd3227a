"""Runs gate and load on one server after another and ranks those that pass everything.

The servers are a TOML file: each with a name and a URL, and a command if it is to be started and ended here. A command
with `{backend}` in it stands for as many servers as `backends` names.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from rich.table import Table

from bench import batch, page, runs
from bench.endpoint import Endpoint, wait_until_ready
from bench.page import Cell
from bench.schema import Model, Result
from sparkforge.console import console, say
from sparkforge.errors import BakeoffError, SparkforgeError, StartFailedError, UsageError
from sparkforge.files import write_atomic, write_json
from sparkforge.paths import ROOT
from sparkforge.process import Child


class Entry(Model):
    """A server as the file describes it."""

    name: str = Field(pattern=r"^[\w .+-]+$")
    url: str
    command: list[str] = Field(default=[])
    backends: list[str] = Field(default=[])
    environment: dict[str, str] = Field(default={})
    ready_seconds: float = 1800.0

    def expand(self) -> list[Entry]:
        """Return one entry for each backend, or itself."""
        if not self.backends:
            return [self]
        return [
            self.model_copy(
                update={
                    "name": f"{self.name} {backend}",
                    "command": [word.replace("{backend}", backend) for word in self.command],
                    "backends": [],
                }
            )
            for backend in self.backends
        ]


class Entries(Model):
    """The whole file."""

    servers: list[Entry] = Field(min_length=1)


class Standing(Model):
    """What became of one server."""

    name: str
    score: float | None = Field(description="geometric mean of tok/s/GPU over all configurations; None if it failed")
    results: list[Result]
    why: str = ""


def load(path: Path) -> list[Entry]:
    """Read the file. Raises UsageError."""
    fix = "see docs/benchmark.md, Bakeoff"
    try:
        entries = Entries.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).servers
    except OSError as error:
        raise UsageError(f"cannot read {path}", error.strerror or str(error), fix) from error
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise UsageError(f"{path.name} lists no servers", str(error).splitlines()[0], fix) from error
    expanded = [each for entry in entries for each in entry.expand()]
    if len({entry.name for entry in expanded}) < len(expanded):
        raise UsageError(f"{path.name} names a server twice", "each needs a name of its own", fix)
    return expanded


def main(flags: Mapping[str, Any], python: Path) -> None:
    """Run all of them, show and write the ranking. Raises BakeoffError if none passed."""
    entries, output = load(Path(flags["file"])), batch.root(flags.get("output", "")) / "bakeoff"
    standings = ranked([one(entry, flags, python, output) for entry in entries])
    write_json(output / "bakeoff.json", [standing.model_dump(mode="json") for standing in standings])
    write_atomic(output / "bakeoff.html", build(standings))
    show(standings)
    say(f"report:  {output / 'bakeoff.html'}")
    if standings[0].score is None:
        told = "\n        ".join(f"{standing.name}: {standing.why}" for standing in standings)
        raise BakeoffError("no server passed", told, f"less {output}/*/server.log")


def one(entry: Entry, flags: Mapping[str, Any], python: Path, output: Path) -> Standing:
    """Start a server if it has a command, measure it, end it. Whatever fails becomes its standing."""
    say(f"— {entry.name}")
    place = output / entry.name.replace(" ", "-")
    told = {**flags, "url": entry.url, "port": "", "output": str(place), "fresh": True}
    child: Child | None = None
    try:
        child = started(entry, place / "server.log")
        results = runs.measure(told, python).results
    except SparkforgeError as error:
        return Standing(name=entry.name, score=None, results=[], why=f"{error.what}: {error.why}")
    finally:
        if child:
            child.end()
    failed = [reason for result in results for reason in result.reasons]
    return Standing(name=entry.name, score=None if failed else score(results), results=results, why="; ".join(failed))


def started(entry: Entry, log: Path) -> Child | None:
    """Start a server and wait until it offers a model. Raises StartFailedError; it is ended then."""
    if not entry.command:
        return None
    child = Child(entry.command, log=log, env=entry.environment, cwd=ROOT)
    if wait_until_ready(Endpoint(entry.url, read_seconds=5.0), entry.ready_seconds, lambda: child.poll() is None):
        return child
    child.end()
    raise StartFailedError(f"{entry.name} did not start", "it ended or offered no model in time", f"less {log}")


def score(results: list[Result]) -> float | None:
    """Return the geometric mean of tok/s/GPU; None without a figure."""
    figures = [result.metrics.tput_per_gpu for result in results if result.metrics]
    return math.exp(sum(map(math.log, figures)) / len(figures)) if figures and min(figures) > 0 else None


def ranked(standings: list[Standing]) -> list[Standing]:
    """Return those that passed, best first, then the others as they came."""
    return sorted(standings, key=lambda standing: -(standing.score or 0.0))


def show(standings: list[Standing]) -> None:
    """Print the ranking."""
    table = Table("rank", "server", "tok/s/GPU", "", title="bakeoff: geometric mean over all configurations")
    for rank, standing in enumerate(standings, 1):
        passed = standing.score is not None
        table.add_row(
            str(rank) if passed else "-", standing.name, page.figure(standing.score or 0.0), standing.why[:200]
        )
    console().print(table)


def build(standings: list[Standing]) -> str:
    """Return the ranking as a page."""
    rows: list[list[Cell]] = [
        [rank if each.score is not None else None, each.name, page.mark(each.score is not None), each.score, each.why]
        for rank, each in enumerate(standings, 1)
    ]
    heads = ("rank", "server", "verdict", "tok/s/GPU", "why")
    caption = "geometric mean over all configurations"
    return page.document("Bakeoff", page.table(heads, rows, caption))
