"""One static page of a folder of results, posted (`{team, result}`) or plain. Only what passed is ranked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element

from pydantic import ValidationError

from bench import page
from bench.chart import Point, Series, lines
from bench.page import Cell, element, section, table
from bench.schema import Result
from sparkforge.console import say
from sparkforge.errors import ResultError
from sparkforge.files import write_atomic
from sparkforge.redact import redact

HEADS = (
    *("rank", "team", "model", "device", "tok/s/GPU", "tok/s/user", "median E2E ms", "bits/byte", "gate", "load by"),
    "date",
)


@dataclass(frozen=True)
class Row:
    """A result and whose it is."""

    team: str
    result: Result


def main(folder: str, output: str, title: str) -> None:
    """Write the page into the folder, or into `output`. Raises ResultError for a folder without a result."""
    place = Path(folder)
    rows, left_out = gather(place)
    if not rows:
        why = f"{len(left_out)} JSON files hold none" if left_out else "there is no JSON file"
        raise ResultError(f"{place} holds no result that passed", why, "./inv bench.perf makes results")
    target = (Path(output) if output else place) / "index.html"
    write_atomic(target, build(rows, left_out, title or "Leaderboard"))
    say(f"{len(rows)} results, {len(left_out)} files left out: {target}")


def gather(folder: Path) -> tuple[list[Row], list[str]]:
    """Return what passed, and for every other JSON file its name and why it was left out."""
    rows, left_out = list[Row](), list[str]()
    for path in sorted(folder.rglob("*.json")):
        if path.name == "batch.json" or path.name.endswith(".submitted.json"):
            continue
        try:
            rows.append(read(path))
        except (ResultError, ValidationError, ValueError, OSError) as error:
            left_out.append(f"{path.name}: {error.why if isinstance(error, ResultError) else 'no result'}")
    return rows, left_out


def read(path: Path) -> Row:
    """Return a file's row. Raises ResultError, ValueError or ValidationError."""
    value = redact(json.loads(path.read_bytes()))  # a page is for others: a model may be named by its folder
    posted = isinstance(value, dict) and isinstance(value.get("result"), dict)
    result = Result.model_validate(value["result"] if posted else value)
    if not result.passed or result.metrics is None:
        raise ResultError(f"{path.name} did not pass", "; ".join(result.reasons), "leave it out")
    return Row(str(value.get("team", ""))[:80] if posted else "", result)


def build(rows: list[Row], left_out: list[str], title: str) -> str:
    """Return the page: a table and a curve for each shape."""
    shapes = sorted({(row.result.config.isl, row.result.config.osl) for row in rows})
    parts = []
    for isl, osl in shapes:
        fitting = [row for row in rows if (row.result.config.isl, row.result.config.osl) == (isl, osl)]
        parts.append(section(f"{isl} in, {osl} out", curve(fitting), *boards(fitting)))
    if left_out:
        parts.append(section("Left out", element("ul", *(element("li", name) for name in left_out))))
    return page.document(title, *parts)


def boards(rows: list[Row]) -> list[Element]:
    """Return one table for each concurrency, ranked by tok/s/GPU."""
    made = []
    for conc in sorted({row.result.config.conc for row in rows}):
        fitting = [row for row in rows if row.result.config.conc == conc]
        ordered = sorted(fitting, key=lambda row: -(row.result.metrics.tput_per_gpu if row.result.metrics else 0.0))
        made.append(table(HEADS, [cells(rank, row) for rank, row in enumerate(ordered, 1)], f"concurrency {conc}"))
    return made


def cells(rank: int, row: Row) -> list[Cell]:
    """Return a row's cells."""
    r, m = row.result, row.result.metrics
    figures: list[Cell] = [m.tput_per_gpu, m.interactivity, m.e2el_ms.median] if m else [None] * 3
    gate = "sanity only" if r.gate.sanity_only else "threshold"
    where = " ".join(filter(None, (r.server.device, str(r.machine.get("processor", "")))))
    date = str(r.machine.get("measured_at", ""))[:10]
    return [rank, row.team or "-", r.config.model, where, *figures, r.gate.bits_per_byte, gate, r.client.name, date]


def curve(rows: list[Row]) -> Element | None:
    """Return tok/s/GPU over tok/s/user, one line a team and model."""
    names = dict.fromkeys(name(row) for row in rows)
    series = []
    for each in names:
        ordered = sorted((row.result for row in rows if name(row) == each), key=lambda r: r.config.conc)
        figures = [(r.metrics, f"c{r.config.conc}") for r in ordered if r.metrics]
        series.append(Series(each, [Point(m.interactivity, m.tput_per_gpu, c) for m, c in figures if m.interactivity]))
    return lines("Throughput of a GPU against the speed that one user sees", "tok/s/user", "tok/s/GPU", series)


def name(row: Row) -> str:
    """Return a series' name."""
    return " · ".join(filter(None, (row.team, row.result.config.model)))
