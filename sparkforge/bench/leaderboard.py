"""One static page of a folder of results, posted (`{team, result}`) or plain. Only what passed is ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sparkforge.bench import page
from sparkforge.bench.chart import Chart, speed_chart
from sparkforge.bench.page import Cell, SortableTable
from sparkforge.bench.schema import LARGEST, Result
from sparkforge.core.console import say
from sparkforge.core.documents import read_json
from sparkforge.core.errors import InputError
from sparkforge.core.files import write_atomic
from sparkforge.core.redact import redact

HEADINGS = (
    *("rank", "team", "model", "device", page.PER_GPU, "output tok/s/user", "median E2E ms", "bits/byte", "gate"),
    "load by",
    "date",
)


@dataclass(frozen=True)
class TeamResult:
    """A result and its team."""

    team: str
    result: Result

    @property
    def name(self) -> str:
        """Its line in a chart: figures of two load clients are not joined."""
        return " · ".join(filter(None, (self.team, self.result.config.model, self.result.client.name)))


@dataclass(frozen=True)
class ShapeSection:
    """The part of the page for one shape: a chart, and a ranking for each concurrency and load client."""

    isl: int
    osl: int
    chart: Chart | None
    rankings: list[SortableTable]


def main(folder: str, output: str, title: str) -> None:
    """Write the page into the folder, or into `output`. Raises InputError for a folder without a result."""
    source = Path(folder)
    entries, left_out = gather(source)
    if not entries:
        why = f"{len(left_out)} JSON files hold none" if left_out else "there is no JSON file"
        raise InputError(
            f"{source} holds no result that passed", why, "./inv bench.perf makes results", code="input.result"
        )
    target = (Path(output) if output else source) / "index.html"
    write_atomic(target, render(entries, left_out, title or "Leaderboard"))
    say(f"{len(entries)} results, {len(left_out)} files left out: {target}")


def gather(folder: Path) -> tuple[list[TeamResult], list[str]]:
    """Return what passed, and for every other JSON file its name and why it was left out."""
    entries, left_out = list[TeamResult](), list[str]()
    for path in sorted(folder.rglob("*.json")):
        if path.name == "batch.json" or path.name.endswith(".submitted.json"):
            continue
        try:
            entries.append(_read(path))
        except (InputError, ValidationError, ValueError, OSError) as error:
            left_out.append(f"{path.name}: {error.why if isinstance(error, InputError) else 'no result'}")
    return entries, left_out


def _read(path: Path) -> TeamResult:
    value = redact(read_json(path, largest=LARGEST))  # a page is for others: a model may be named by its folder
    posted = isinstance(value, dict) and isinstance(value.get("result"), dict)
    result = Result.model_validate(value["result"] if posted else value)
    if not result.passed or result.metrics is None:
        raise InputError(f"{path.name} did not pass", "; ".join(result.reasons), "leave it out", code="input.result")
    return TeamResult(str(value.get("team", ""))[:80] if posted else "", result)


def render(entries: Sequence[TeamResult], left_out: Sequence[str], title: str) -> str:
    """Return the page: for each shape a chart, and a ranking for each concurrency and load client."""
    shapes: dict[tuple[int, int], list[TeamResult]] = {}
    for entry in entries:
        shapes.setdefault((entry.result.config.isl, entry.result.config.osl), []).append(entry)
    sections = [
        ShapeSection(isl, osl, speed_chart((entry.name, entry.result) for entry in members), _rankings(members))
        for (isl, osl), members in sorted(shapes.items())
    ]
    return page.render("leaderboard.html.jinja", title, shapes=sections, left_out=left_out)


def _rankings(entries: Sequence[TeamResult]) -> list[SortableTable]:
    """Return a table for each concurrency and load client: two clients count and time differently."""
    groups: dict[tuple[int, str], list[TeamResult]] = {}
    for entry in sorted(entries, key=lambda entry: -(entry.result.metrics.tput_per_gpu if entry.result.metrics else 0)):
        groups.setdefault((entry.result.config.conc, entry.result.client.name), []).append(entry)
    return [
        SortableTable(
            f"concurrency {conc}, load by {client}",
            HEADINGS,
            [_cells(rank, entry) for rank, entry in enumerate(group, 1)],
        )
        for (conc, client), group in sorted(groups.items())
    ]


def _cells(rank: int, entry: TeamResult) -> list[Cell]:
    result, metrics = entry.result, entry.result.metrics
    return [
        rank,
        entry.team or "-",
        result.config.model,
        " ".join(filter(None, (result.server.device, str(result.machine.get("processor", ""))))),
        *((metrics.tput_per_gpu, metrics.interactivity, metrics.e2el_ms.median) if metrics else (None, None, None)),
        result.gate.bits_per_byte,
        "sanity only" if result.gate.sanity_only else f"limits on {result.gate.text}",
        result.client.name,
        str(result.machine.get("measured_at", ""))[:10],
    ]
